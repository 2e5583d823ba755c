"""Pools, and what joins codes and moves them about, against NumPy one window or element at a time."""

from __future__ import annotations

from ctypes import c_uint32
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import bound_shapes
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Counter, Pool, StoredCodes
from fedmpq.model.dropout import Dropout, kept
from fedmpq.model.randomness import Draws, Purpose
from tests.kernels.training_reference import halved, packed, widened

per_isa = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]
Spans = list[tuple[int, int]]
threads = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)
CHANNELS = st.sampled_from([1, 3, 8, 17])
FORMS = st.sampled_from([(True, 0), (False, 0), (False, 127)])
"""Whether two codes share a byte, and the byte of code 0."""


@st.composite
def spans(draw: st.DrawFn, size: int) -> Spans:
    """Windows along an axis: of any length, anywhere, in any order."""
    starts = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    return [(start, draw(st.integers(start + 1, size))) for start in starts]


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, Spans, Spans]:
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rows, columns = draw(spans(height)), draw(spans(width))
    pool = Pool.over(draw(st.integers(1, 3)), (draw(CHANNELS), height, width), rows, columns)
    return pool, rows, columns


def images_of(pool: Pool, pairs: bool, seed: int) -> Array:
    """Few levels, so that windows have ties."""
    shape = (pool.images, pool.height, pool.width, pool.channels)
    return np.random.default_rng(seed).integers(0, 4, shape) * (5 if pairs else 80)


def errors(shape: tuple[int, ...], seed: int) -> NDArray[np.uint16]:
    return halved(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@per_isa
@given(pools(), st.booleans(), seeds, threads)
def test_max_pool_and_its_backward_pass(
    isa: str, drawn: tuple[Pool, Spans, Spans], pairs: bool, seed: int, threads: int
) -> None:
    pool, rows, columns = drawn
    values = images_of(pool, pairs, seed)
    codes = StoredCodes(packed(values, pairs), pairs, 0)
    out = np.full(StoredCodes.nbytes(pool.images, pool.outputs, pairs), 0xEE, np.uint8)
    error = errors((pool.images, len(rows), len(columns), pool.channels), seed)
    back = np.full(pool.images * pool.inputs, 77, np.uint16)
    bound_shapes.max_pool(pool, codes, threads, out)()
    bound_shapes.max_pool_backward(pool, codes, error, threads, back)()
    expected = np.zeros(error.shape, np.int64)
    sums = np.zeros(values.shape, np.float32)
    for n, y, x, c in np.ndindex(error.shape):
        (top, bottom), (left, right) = rows[y], columns[x]
        under = values[n, top:bottom, left:right, c]
        expected[n, y, x, c] = under.max()
        row, column = np.unravel_index(under.argmax(), under.shape)  # NumPy's too is the first
        sums[n, top + row, left + column, c] += widened(error)[n, y, x, c]
    np.testing.assert_array_equal(out, packed(expected, pairs))
    np.testing.assert_array_equal(back, halved(sums).reshape(-1))


@per_isa
@given(pools(), st.booleans(), st.sampled_from([(0, 0, 255), (128, -128, 127)]), seeds, threads)
def test_average_pool_and_its_backward_pass(
    isa: str,
    drawn: tuple[Pool, Spans, Spans],
    pairs: bool,
    form: tuple[int, int, int],
    seed: int,
    threads: int,
) -> None:
    pool, rows, columns = drawn
    zero, low, high = (0, 0, 255) if pairs else form
    values = images_of(pool, pairs, seed)
    codes = StoredCodes(packed(values, pairs), pairs, zero)
    random = np.random.default_rng(seed)
    multipliers, shares = random.uniform(2**-8, 2, (2, pool.pixels)).astype(np.float32)
    out = np.full(pool.images * pool.outputs, 0xEE, np.uint8)
    error = errors((pool.images, len(rows), len(columns), pool.channels), seed)
    back = np.full(pool.images * pool.inputs, 77, np.uint16)
    bound_shapes.average_pool(pool, codes, multipliers, low, high, threads, out)()
    bound_shapes.average_pool_backward(pool, error, shares, threads, back)()
    expected = np.zeros(error.shape, np.float32)
    spread = np.zeros(values.shape, np.float32)
    for (y, (top, bottom)), (x, (left, right)) in (
        (row, column) for row in enumerate(rows) for column in enumerate(columns)
    ):
        window = y * len(columns) + x
        sums = (values[:, top:bottom, left:right] - zero).sum(axis=(1, 2)).astype(np.float32)
        expected[:, y, x] = np.rint(np.clip(sums * multipliers[window], low, high)) - low
        spread[:, top:bottom, left:right] += (widened(error)[:, y, x] * shares[window])[:, None, None]
    np.testing.assert_array_equal(out, expected.astype(np.uint8).reshape(-1))
    np.testing.assert_array_equal(back, halved(spread).reshape(-1))


@per_isa
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.lists(
        st.tuples(CHANNELS, st.sampled_from([(True, 0), (False, 0), (False, 127)])), min_size=1, max_size=4
    ),
    st.booleans(),
    seeds,
    threads,
)
def test_codes_are_joined_with_a_scale_each_and_errors_parted(
    isa: str,
    images: int,
    pixels: int,
    parts: list[tuple[int, tuple[bool, int]]],
    signed: bool,
    seed: int,
    threads: int,
) -> None:
    random = np.random.default_rng(seed)
    low, high = (-127, 127) if signed else (0, 255)
    total, start = sum(channels for channels, _ in parts), 0
    out = np.full(images * pixels * total, 0xEE, np.uint8)
    error = errors((images, pixels, total), seed)
    for channels, (pairs, zero) in parts:
        extent = FedmpqExtent(images, pixels, channels)
        values = random.integers(0, 16 if pairs else 2 * zero or 256, (images, pixels, channels))
        multiplier = np.float32(random.uniform(0.01, 18))
        codes = StoredCodes(packed(values, pairs), pairs, zero)
        bound_shapes.join(codes, extent, float(multiplier), low, high, start, total, threads, out)()
        joined = np.clip((values - zero).astype(np.float32) * multiplier, low, high)
        got = out.reshape(images, pixels, total)[..., start : start + channels]
        np.testing.assert_array_equal(got, (np.rint(joined) - low).astype(np.uint8))
        part = np.full(images * pixels * channels, 77, np.uint16)
        bound_shapes.part_errors(error, extent, start, total, threads, part)()
        np.testing.assert_array_equal(part, error[..., start : start + channels].reshape(-1))
        start += channels


@per_isa
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.lists(st.integers(-1, 1000), min_size=1, max_size=60),
    FORMS,
    seeds,
    threads,
)
def test_elements_come_from_where_the_table_says(
    isa: str, images: int, count: int, drawn: list[int], form: tuple[bool, int], seed: int, threads: int
) -> None:
    pairs, zero = form
    places = np.array([min(place, count - 1) for place in drawn], np.int32)
    values = np.random.default_rng(seed).integers(0, 16 if pairs else 256, (images, count))
    codes = StoredCodes(packed(values, pairs), pairs, zero)
    out = np.full(StoredCodes.nbytes(images, places.size, pairs), 0xEE, np.uint8)
    bound_shapes.rearrange(codes, images, count, places, threads, out)()
    expected = np.where(places < 0, zero, values[:, places])
    np.testing.assert_array_equal(out, packed(expected, pairs))
    error = errors((images, places.size), seed)
    back = np.full(images * count, 77, np.uint16)
    bound_shapes.rearrange_backward(error, images, count, places, threads, back)()
    sums = np.zeros((images, count), np.float32)
    for number, place in enumerate(places):
        if place >= 0:
            sums[:, place] += widened(error)[:, number]
    np.testing.assert_array_equal(back, halved(sums).reshape(-1))


@per_isa
@given(
    st.integers(1, 3),
    st.integers(1, 7),
    st.one_of(st.integers(1, 70), st.just(4099)),
    st.booleans(),
    st.sampled_from([0.125, 0.5, 0.90625]),
    FORMS,
    seeds,
    threads,
)
def test_what_is_dropped_follows_from_the_counter(
    isa: str,
    images: int,
    pixels: int,
    channels: int,
    whole: bool,
    rate: float,
    form: tuple[bool, int],
    seed: int,
    threads: int,
) -> None:
    """Element by element, or channel by channel; more numbers than are drawn at a time."""
    pairs, zero = form
    dropout, draws = Dropout(rate, whole), Draws(seed % 2**32, 5, 6)
    stays = kept(dropout, draws, 7, 8, (images, pixels, channels))
    count = pixels * channels
    values = np.random.default_rng(seed).integers(0, 16 if pairs else 256, (images, count))
    codes = StoredCodes(packed(values, pairs), pairs, zero)
    extent = FedmpqExtent(images, pixels, channels)
    out = np.full(StoredCodes.nbytes(images, count, pairs), 0xEE, np.uint8)
    counter, step = Counter(draws.seed, 5, 6, 7, 0), c_uint32(8)
    stream = counter, int(Purpose.DROPOUT), step, threads
    bound_shapes.drop(codes, extent, whole, rate, *stream, out)()
    expected = np.where(stays.reshape(images, count), values, zero)
    np.testing.assert_array_equal(out, packed(expected, pairs))
    error = errors((images, count), seed)
    larger = halved(widened(error) * dropout.factor)
    factor = float(dropout.factor)
    bound_shapes.drop_errors(extent, whole, rate, factor, *stream, error)()
    np.testing.assert_array_equal(error, np.where(stays.reshape(images, count), larger, 0))


def test_as_much_is_dropped_as_the_rate_says() -> None:
    dropout = Dropout(0.25)
    stays = kept(dropout, Draws(1, 2, 3), 0, 0, (8, 5, 5, 50))
    assert stays.mean() == pytest.approx(0.75, abs=0.01)
    assert (stays[0] != stays[1]).any()
    channels = kept(Dropout(0.25, whole_channels=True), Draws(1, 2, 3), 0, 0, (200, 2, 2, 50))
    assert (channels == channels[:, :1, :1]).all()
    assert channels.mean() == pytest.approx(0.75, abs=0.02)
