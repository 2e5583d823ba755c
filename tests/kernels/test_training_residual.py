from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels.tensors import StoredCodes
from tests.kernels import training_calls as training
from tests.kernels.training_reference import halved, packed, unpacked, widened

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]
threads = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)
scales = st.floats(2**-8, 2.0, width=32)


def stored(rng: np.random.Generator, shape: tuple[int, ...], pairs: bool, zero: int) -> StoredCodes:
    return StoredCodes(packed(rng.integers(0, 16 if pairs else 256, shape), pairs), pairs, zero)


def codes_of(codes: StoredCodes, images: int, count: int) -> NDArray[np.int64]:
    return unpacked(codes.data, images, count, codes.pairs).astype(np.int64) - codes.zero


@st.composite
def operands(draw: st.DrawFn) -> tuple[int, int, tuple[StoredCodes, StoredCodes]]:
    images, count = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 16, 33, 64, 100]))
    rng = np.random.default_rng(draw(seeds))
    forms = [draw(st.sampled_from([(True, 0), (False, 0), (False, 128)])) for _ in range(2)]
    left, right = (stored(rng, (images, count), pairs, zero) for pairs, zero in forms)
    return images, count, (left, right)


@per_isa
@given(
    operands(),
    scales,
    scales,
    scales,
    st.sampled_from([(0, 15, True), (0, 15, False), (0, 255, False), (-128, 127, False)]),
    threads,
)
def test_add_quantizes_the_sum_and_remembers_what_was_clipped(
    isa: str,
    drawn: tuple[int, int, tuple[StoredCodes, StoredCodes]],
    left_scale: float,
    right_scale: float,
    step: float,
    form: tuple[int, int, bool],
    threads: int,
) -> None:
    (images, count, (left, right)), (low, high, pairs) = drawn, form
    out = np.full(StoredCodes.nbytes(images, count, pairs), 0xEE, np.uint8)
    states = np.full(images * ((count + 3) // 4), 0xEE, np.uint8)
    scaled = (left, left_scale, right, right_scale)
    training.add(*scaled, images, count, step, low, high, pairs, threads, out, states)
    first = codes_of(left, images, count).astype(np.float32) * np.float32(left_scale)
    second = codes_of(right, images, count).astype(np.float32) * np.float32(right_scale)
    t = (first + second) / np.float32(step)
    expected = np.rint(np.clip(t, low, high)).astype(np.int64) - low
    np.testing.assert_array_equal(out, packed(expected, pairs))
    where = np.select([t >= high, t <= low], [1, 2])
    np.testing.assert_array_equal(unpacked_states(states, images, count), where)


def unpacked_states(states: Array, images: int, count: int) -> Array:
    """A quarter of an image's elements in the lowest two bits of its bytes, the next in the next two."""
    rows = states.reshape(images, -1)
    return np.concatenate([rows >> 2 * i & 3 for i in range(4)], axis=1)[:, :count]


def packed_states(where: Array) -> Array:
    images, count = where.shape
    quarters = np.pad(where, ((0, 0), (0, -count % 4))).reshape(images, 4, -1)
    states: Array = (quarters << np.array([0, 2, 4, 6])[:, None]).sum(axis=1).astype(np.uint8)
    return states.reshape(-1)


@per_isa
@given(st.integers(1, 3), st.sampled_from([1, 3, 4, 17, 100]), seeds, threads)
def test_clipped_errors_are_summed_and_zeroed(
    isa: str, images: int, count: int, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    where = rng.integers(0, 3, (images, count))
    # Numbers whose sums are exact in any order.
    before = halved(rng.integers(-128, 128, (images, count)).astype(np.float32) / np.float32(16))
    error = before.copy()
    clipped = training.pass_error(packed_states(where), images, count, threads, error)
    np.testing.assert_array_equal(error, np.where(where == 0, before, 0))
    for side, total in zip((1, 2), clipped, strict=True):
        assert total == widened(before)[where == side].sum(dtype=np.float64)


@per_isa
@given(st.sampled_from([1, 7, 16, 33, 1000]), seeds)
def test_errors_are_added_and_rounded(isa: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = (halved(rng.normal(size=count).astype(np.float32)) for _ in range(2))
    error = first.copy()
    training.add_errors(second, error)
    np.testing.assert_array_equal(error, halved(widened(first) + widened(second)))


@given(st.integers(1, 40), st.integers(1, 30), st.floats(2**-12, 2**-4, width=32), seeds)
def test_softmax_loss_equals_the_one_in_double(samples: int, classes: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    acc = rng.integers(-1000, 1000, (samples, classes)).astype(np.int32)
    scales = np.full(classes, scale, np.float32) * rng.uniform(0.5, 2, classes).astype(np.float32)
    bias = rng.normal(size=classes).astype(np.float32)
    labels = rng.integers(0, classes, samples)
    shift = rng.normal(scale=3, size=classes).astype(np.float32)
    loss, right, gradient = training.softmax_loss(acc, samples, classes, scales, bias, labels, shift)
    logits = ((acc.astype(np.float32) * scales + bias) + shift).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1))
    picked = shifted[np.arange(samples), labels]
    assert right == (logits.argmax(axis=1) == labels).sum()
    np.testing.assert_allclose(loss, (log_sums - picked).mean(), rtol=1e-5, atol=1e-6)
    expected = np.exp(shifted - log_sums[:, None])
    expected[np.arange(samples), labels] -= 1
    np.testing.assert_allclose(gradient, expected / samples, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [0, 10_000, -10_000])
def test_logits_far_apart_give_a_finite_loss(value: int) -> None:
    acc = np.array([[value, 0]], np.int32)
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    loss, _, gradient = training.softmax_loss(acc, 1, 2, one, zero, np.array([0]))
    assert np.isfinite(gradient).all()
    # The least exponential in use is that of -87.
    assert loss == pytest.approx({0: np.log(2), 10_000: 0, -10_000: 10_000}[value], rel=1e-5, abs=1e-6)


def test_a_label_beyond_the_classes_is_refused() -> None:
    acc, ones = np.zeros((1, 3), np.int32), np.ones(3, np.float32)
    for label in (-1, 3):
        with pytest.raises(ValueError, match="the model has 3 classes"):
            training.softmax_loss(acc, 1, 3, ones, ones, np.array([label]))


@given(st.integers(1, 20), st.integers(1, 20), seeds)
def test_real_errors_become_halves(rows: int, channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(rows, channels)).astype(np.float32)
    gain = rng.normal(size=channels).astype(np.float32)
    error = np.empty((rows, channels), np.uint16)
    greatest = training.halve_errors(real, gain, error)
    np.testing.assert_array_equal(error, halved(real * gain))
    assert greatest == np.abs(widened(error)).max()
