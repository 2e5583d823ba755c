"""The losses of labels and of values against formulas in double precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import bound_losses
from fedmpq.kernels.call import Call, KernelError

Floats = NDArray[np.float32]
Loss = Callable[..., Call]


def run(
    loss: Loss, acc: NDArray[np.int32], scale: Floats, bias: Floats, targets: Floats
) -> tuple[float, int, Floats]:
    samples, outputs = acc.shape
    gradient, mean = np.empty((samples, outputs), np.float32), np.empty(1)
    right = loss(acc, samples, outputs, scale, bias, targets, gradient, mean)()
    return float(mean[0]), int(right), gradient


def drawn(
    samples: int, outputs: int, scale: float, seed: int
) -> tuple[NDArray[np.int32], Floats, Floats, Floats]:
    random = np.random.default_rng(seed)
    acc = random.integers(-1000, 1000, (samples, outputs)).astype(np.int32)
    scales = np.full(outputs, scale, np.float32) * random.uniform(0.5, 2, outputs).astype(np.float32)
    return (
        acc,
        scales,
        random.normal(size=outputs).astype(np.float32),
        random.normal(0, 2, acc.shape).astype(np.float32),
    )


SIZES = (
    st.integers(1, 20),
    st.integers(1, 20),
    st.floats(2**-12, 2**-4, width=32),
    st.integers(0, 2**32 - 1),
)


@given(*SIZES)
def test_the_sigmoid_loss_equals_the_one_in_double(
    samples: int, outputs: int, scale: float, seed: int
) -> None:
    acc, scales, bias, values = drawn(samples, outputs, scale, seed)
    targets = (values > 0).astype(np.float32)
    loss, right, gradient = run(bound_losses.sigmoid_loss, acc, scales, bias, targets)
    logits = (acc.astype(np.float32) * scales + bias).astype(np.float64)
    shares = 1 / (1 + np.exp(-logits))
    # log(1 + exp(z)) - z t is the cross-entropy, and stays finite where a share is 0 or 1.
    np.testing.assert_allclose(
        loss, (np.logaddexp(0, logits) - logits * targets).mean(), rtol=1e-5, atol=1e-6
    )
    assert right == ((logits > 0) == (targets == 1)).sum()
    np.testing.assert_allclose(gradient, (shares - targets) / targets.size, rtol=1e-5, atol=1e-7)


@given(*SIZES)
def test_the_squared_loss_equals_the_one_in_double(
    samples: int, outputs: int, scale: float, seed: int
) -> None:
    acc, scales, bias, targets = drawn(samples, outputs, scale, seed)
    loss, none, gradient = run(bound_losses.squared_loss, acc, scales, bias, targets)
    apart = (acc.astype(np.float32) * scales + bias).astype(np.float64) - targets
    np.testing.assert_allclose(loss, np.square(apart).mean(), rtol=1e-5, atol=1e-6)
    assert none == 0
    np.testing.assert_allclose(gradient, 2 * apart / apart.size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "target", "expected"), [(10_000, 1, 0), (-10_000, 0, 0), (-10_000, 1, 10_000)]
)
def test_labels_far_from_the_boundary_give_a_finite_loss(value: int, target: int, expected: float) -> None:
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    acc, targets = np.array([[value]], np.int32), np.array([[target]], np.float32)
    loss, _, gradient = run(bound_losses.sigmoid_loss, acc, one, zero, targets)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("loss", [bound_losses.sigmoid_loss, bound_losses.squared_loss])
def test_an_empty_batch_is_refused(loss: Loss) -> None:
    one = np.ones(1, np.float32)
    call = loss(
        np.zeros(0, np.int32), 0, 1, one, one, np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(1)
    )
    with pytest.raises(KernelError):
        call()
