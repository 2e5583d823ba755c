from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Conv, StoredCodes
from tests.kernels import training_calls as training
from tests.kernels import training_reference as reference
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


@st.composite
def pools(draw: st.DrawFn) -> Conv:
    """Windows of every kind whose padding is at most half of the kernel, which is all a graph allows."""
    sides = []
    for _ in range(2):
        kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        pad = draw(st.integers(0, kernel // 2))
        sides.append((max(draw(st.integers(1, 9)), kernel - 2 * pad), kernel, stride, pad, 1))
    (height, kernel_h, stride_h, pad_h, _), (width, kernel_w, stride_w, pad_w, _) = sides
    channels = draw(st.sampled_from([1, 3, 8, 17]))
    sizes = (draw(st.integers(1, 3)), height, width, channels)
    outs = (reference.output_size(*sides[0]), reference.output_size(*sides[1]), channels)
    window = (kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w)
    return Conv(*sizes, *outs, *window, 1, 1, 1)


def images_of(pool: Conv, pairs: bool, seed: int) -> tuple[StoredCodes, Array]:
    """Few levels, so that windows have ties."""
    rng = np.random.default_rng(seed)
    shape = (pool.images, pool.height, pool.width, pool.channels)
    values = rng.integers(0, 4, shape) * (5 if pairs else 80)
    return StoredCodes(packed(values, pairs), pairs, 0), values


def errors_of(pool: Conv, seed: int) -> NDArray[np.uint16]:
    shape = (pool.images, pool.out_height, pool.out_width, pool.channels)
    return halved(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def each_window(pool: Conv) -> list[tuple[int, int, slice, slice]]:
    """Output pixels in order with the rows and columns under their windows, in padded coordinates."""
    return [
        (
            y,
            x,
            slice(y * pool.stride_h, y * pool.stride_h + pool.kernel_h),
            slice(x * pool.stride_w, x * pool.stride_w + pool.kernel_w),
        )
        for y in range(pool.out_height)
        for x in range(pool.out_width)
    ]


def cropped(pool: Conv, wide: Array) -> Array:
    return wide[:, pool.pad_h :, pool.pad_w :][:, : pool.height, : pool.width]


@per_isa
@given(pools(), st.booleans(), seeds, threads)
def test_max_pool_and_its_backward_pass(isa: str, pool: Conv, pairs: bool, seed: int, threads: int) -> None:
    codes, values = images_of(pool, pairs, seed)
    wide = reference.padded(pool, values, fill=-1)
    expected = np.stack([window for _, _, window in reference.windows(pool, wide)]).max(axis=0)
    out = np.full(StoredCodes.nbytes(pool.images, pool.outputs, pairs), 0xEE, np.uint8)
    training.max_pool(pool, codes, threads, out)
    np.testing.assert_array_equal(out, packed(expected, pairs))

    error = errors_of(pool, seed)
    sums = np.zeros(wide.shape, np.float32)
    for y, x, rows, columns in each_window(pool):
        under = wide[:, rows, columns].reshape(pool.images, -1, pool.channels)
        first = under.argmax(axis=1)  # NumPy's too is the first of the greatest
        picked = first[:, None] == np.arange(under.shape[1])[:, None]
        spread = np.where(picked, widened(error)[:, y, x][:, None], np.float32(0))
        sums[:, rows, columns] += spread.reshape(pool.images, pool.kernel_h, pool.kernel_w, pool.channels)
    given_back = np.full(pool.images * pool.inputs, 77, np.uint16)
    training.max_pool_backward(pool, codes, error, threads, given_back)
    np.testing.assert_array_equal(given_back, halved(cropped(pool, sums)).reshape(-1))


@per_isa
@given(pools(), st.booleans(), st.sampled_from([(0, 0, 255), (128, -128, 127)]), scales, seeds, threads)
def test_average_pool_and_its_backward_pass(
    isa: str,
    pool: Conv,
    pairs: bool,
    form: tuple[int, int, int],
    multiplier: float,
    seed: int,
    threads: int,
) -> None:
    zero, low, high = (0, 0, 255) if pairs else form
    codes, values = images_of(pool, pairs, seed)
    codes = StoredCodes(codes.data, pairs, zero)
    wide = reference.padded(pool, values.astype(np.int64) - zero)
    sums = np.stack([window for _, _, window in reference.windows(pool, wide)]).sum(axis=0)
    scaled = np.clip(sums.astype(np.float32) * np.float32(multiplier), low, high)
    out = np.full(pool.images * pool.outputs, 0xEE, np.uint8)
    training.average_pool(pool, codes, multiplier, low, high, threads, out)
    np.testing.assert_array_equal(out, (np.rint(scaled).astype(np.int64) - low).reshape(-1))

    error = errors_of(pool, seed)
    shares = widened(error) * (np.float32(1) / np.float32(pool.kernel_h * pool.kernel_w))
    spread = np.zeros(wide.shape, np.float32)
    for y, x, rows, columns in each_window(pool):
        spread[:, rows, columns] += shares[:, y, x][:, None, None]
    given_back = np.full(pool.images * pool.inputs, 77, np.uint16)
    training.average_pool_backward(pool, error, threads, given_back)
    np.testing.assert_array_equal(given_back, halved(cropped(pool, spread)).reshape(-1))


@given(st.integers(1, 40), st.integers(1, 30), st.floats(2**-12, 2**-4, width=32), seeds)
def test_softmax_loss_equals_the_one_in_double(samples: int, classes: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    acc = rng.integers(-1000, 1000, (samples, classes)).astype(np.int32)
    scales = np.full(classes, scale, np.float32) * rng.uniform(0.5, 2, classes).astype(np.float32)
    bias = rng.normal(size=classes).astype(np.float32)
    labels = rng.integers(0, classes, samples)
    loss, right, gradient = training.softmax_loss(acc, samples, classes, scales, bias, labels)
    logits = (acc.astype(np.float32) * scales + bias).astype(np.float64)
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
