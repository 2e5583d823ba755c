"""Backward products in floats against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fedmpq.kernels.tensors import Conv
from fedmpq.training.float_errors import halved, input_gradient, weight_gradient, widened

pytestmark = pytest.mark.usefixtures("one_thread")

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 3),
    channels=pairs,
    images=st.integers(1, 3),
    size=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kernel=pairs,
    stride=pairs,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=pairs,
    seed=st.integers(0, 2**32 - 1),
)
def test_gradients_are_those_of_autograd(
    groups: int,
    channels: tuple[int, int],
    images: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    seed: int,
) -> None:
    extents = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    height, width = (max(s, extent) for s, extent in zip(size, extents, strict=True))
    inputs, outputs = (groups * each for each in channels)
    random = torch.Generator().manual_seed(seed)
    source = torch.randn(images, inputs, height, width, generator=random, dtype=torch.double).float()
    weight = torch.randn(outputs, inputs // groups, *kernel, generator=random, dtype=torch.double).float()
    exact, exact_weight = source.double().requires_grad_(), weight.double().requires_grad_()
    out = functional.conv2d(exact, exact_weight, None, stride, padding, dilation, groups)
    error = torch.randn(out.shape, generator=random, dtype=torch.double).float()
    out.backward(error.double())
    rows = error.permute(0, 2, 3, 1).contiguous().numpy().reshape(-1)
    out_size = out.shape[2:]
    conv = Conv(
        images, height, width, inputs, *out_size, outputs, *kernel, *stride, *padding, *dilation, groups
    )
    assert exact.grad is not None
    assert exact_weight.grad is not None
    np.testing.assert_allclose(
        weight_gradient(conv, source.permute(0, 2, 3, 1).numpy(), rows), exact_weight.grad.numpy(), atol=1e-4
    )
    np.testing.assert_allclose(
        input_gradient(conv, weight.numpy(), rows), exact.grad.permute(0, 2, 3, 1).numpy(), atol=1e-4
    )


def test_every_half_is_its_own_rounding() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    numbers = ~np.isnan(widened(halves))
    np.testing.assert_array_equal(halved(widened(halves))[numbers], halves[numbers])


def test_halves_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 10_000, dtype=np.uint32)
    ties = bits & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    values = np.concatenate((bits, ties, ties - 1, ties + 1)).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widened(halved(values)), expected)
