"""Lookups and products of codes, forwards and backwards, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import StoredCodes
from tests.kernels.training_reference import halved, packed, unpacked, widened

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]
threads = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)
counts = st.sampled_from([1, 3, 15, 16, 17, 32, 33, 64, 100, 257])
images_drawn = st.integers(1, 3)


def stored(rng: np.random.Generator, shape: tuple[int, ...], pairs: bool, zero: int) -> StoredCodes:
    return StoredCodes(packed(rng.integers(0, 16 if pairs else 256, shape), pairs), pairs, zero)


def bytes_of(codes: StoredCodes, images: int, count: int) -> NDArray[np.int64]:
    return unpacked(codes.data, images, count, codes.pairs).astype(np.int64)


def exact_errors(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Numbers whose sums are exact in any order."""
    return halved(rng.integers(-128, 128, shape).astype(np.float32) / np.float32(16))


@per_isa
@given(images_drawn, counts, st.booleans(), st.booleans(), seeds, threads)
def test_lookup_takes_the_entry_of_each_stored_code(
    isa: str, images: int, count: int, pairs: bool, out_pairs: bool, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = stored(rng, (images, count), pairs, 0)
    table = rng.integers(0, 16 if out_pairs else 256, 256).astype(np.uint8)
    out = np.full(StoredCodes.nbytes(images, count, out_pairs), 0xEE, np.uint8)
    bound.lookup(codes, images, count, table, out_pairs, threads, out)()
    expected = table[bytes_of(codes, images, count)]
    np.testing.assert_array_equal(out, packed(expected, out_pairs))


@per_isa
@given(images_drawn, counts, st.booleans(), st.booleans(), seeds, threads)
def test_errors_are_multiplied_by_the_slope_of_their_code(
    isa: str, images: int, count: int, pairs: bool, clips: bool, seed: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = stored(rng, (images, count), pairs, 0)
    slopes = rng.normal(size=256).astype(np.float32)
    states = (rng.integers(0, 3, 256) if clips else np.zeros(256)).astype(np.uint8)
    before = exact_errors(rng, (images, count))
    error, clipped = before.copy(), np.full(2, np.nan)
    bound.lookup_backward(codes, images, count, slopes, states, threads, error, clipped)()
    places = bytes_of(codes, images, count)
    where = states[places]
    passed = np.where(where == 0, slopes[places], np.float32(0))
    np.testing.assert_array_equal(widened(error), widened(halved(widened(before) * passed)))
    for side, total in zip((1, 2), clipped, strict=True):
        assert total == widened(before)[where == side].sum(dtype=np.float64)


def test_tables_that_cannot_be_are_refused() -> None:
    codes, out = StoredCodes(np.zeros(8, np.uint8), False, 0), np.zeros(8, np.uint8)
    table, slopes, states = np.full(256, 16, np.uint8), np.ones(256, np.float32), np.zeros(256, np.uint8)
    bound.lookup(codes, 1, 8, table, False, 1, out)()
    with pytest.raises(KernelError, match="outside what it takes"):
        bound.lookup(codes, 1, 8, table, True, 1, out)()
    states[255] = 3
    with pytest.raises(KernelError, match="outside what it takes"):
        bound.lookup_backward(codes, 1, 8, slopes, states, 1, np.zeros(8, np.uint16), np.zeros(2))()
    for size in (-1, 0):
        with pytest.raises(KernelError, match="outside what it takes"):
            bound.lookup(codes, 1, size, table, False, 1, out)()


@st.composite
def factors(draw: st.DrawFn) -> tuple[FedmpqExtent, bool, StoredCodes, StoredCodes, np.random.Generator]:
    """Codes to multiply; with `spread` the right ones are one for each channel."""
    images, pixels = draw(images_drawn), draw(st.sampled_from([1, 2, 7, 30]))
    channels, spread = draw(st.sampled_from([1, 3, 8, 17, 40, 200])), draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    forms = [draw(st.sampled_from([(True, 0), (False, 0), (False, 127)])) for _ in range(2)]
    shapes = (images, pixels * channels), (images, channels if spread else pixels * channels)
    left, right = (stored(rng, shape, *form) for shape, form in zip(shapes, forms, strict=True))
    return FedmpqExtent(images, pixels, channels), spread, left, right, rng


FORMS = st.sampled_from([(0, 15, True), (0, 255, False), (-127, 127, False), (-7, 7, True)])


def codes_of(
    extent: FedmpqExtent, spread: bool, left: StoredCodes, right: StoredCodes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both factors as (images, pixels, channels), the right one with one pixel if it is spread."""
    images, pixels, channels = extent.images, extent.pixels, extent.channels
    rights = 1 if spread else pixels
    a = bytes_of(left, images, pixels * channels) - left.zero
    b = bytes_of(right, images, rights * channels) - right.zero
    return a.reshape(images, pixels, channels), b.reshape(images, rights, channels)


@per_isa
@given(factors(), st.floats(2**-12, 1, width=32), FORMS, threads)
def test_products_are_rounded(
    isa: str, drawn: Any, multiplier: float, form: tuple[int, int, bool], threads: int
) -> None:
    extent, spread, left, right, _ = drawn
    low, high, pairs = form
    count = extent.pixels * extent.channels
    out = np.full(StoredCodes.nbytes(extent.images, count, pairs), 0xEE, np.uint8)
    bound.multiply(left, right, extent, spread, multiplier, low, high, pairs, threads, out)()
    a, b = codes_of(extent, spread, left, right)
    t = (a * b).astype(np.float32) * np.float32(multiplier)
    np.testing.assert_array_equal(out, packed(np.rint(np.clip(t, low, high)) - low, pairs))


@per_isa
@given(factors(), st.floats(2**-12, 1, width=32), FORMS, threads, st.booleans())
def test_errors_of_products_go_to_both_factors(
    isa: str, drawn: Any, multiplier: float, form: tuple[int, int, bool], threads: int, in_place: bool
) -> None:
    extent, spread, left, right, rng = drawn
    low, high, _ = form
    a, b = codes_of(extent, spread, left, right)
    before = exact_errors(rng, a.shape)
    error = before.copy()
    left_error = error if in_place else np.full(a.shape, 77, np.uint16)
    right_error, clipped = np.full(b.shape, 77, np.uint16), np.full(2, np.nan)
    scales = np.float32(0.37), np.float32(0.11)
    form_and_scales = multiplier, low, high, float(scales[0]), float(scales[1])
    outs = error, threads, left_error, right_error, clipped
    bound.multiply_backward(left, right, extent, spread, *form_and_scales, *outs)()
    t = (a * b).astype(np.float32) * np.float32(multiplier)
    above, below = t >= high, t <= low
    g = np.where(above | below, np.float32(0), widened(before))
    np.testing.assert_array_equal(
        widened(left_error), widened(halved(g * (b.astype(np.float32) * scales[1])))
    )
    # Products of these errors and codes are exact, and so are their sums.
    sums = (g * a).sum(axis=1, keepdims=True) if spread else g * a
    np.testing.assert_array_equal(widened(right_error), widened(halved(sums.astype(np.float32) * scales[0])))
    assert clipped[0] == widened(before)[above].sum(dtype=np.float64)
    assert clipped[1] == widened(before)[below].sum(dtype=np.float64)


def test_products_that_cannot_be_are_refused() -> None:
    codes, out = StoredCodes(np.zeros(64, np.uint8), False, 0), np.zeros(64, np.uint8)
    extent = FedmpqExtent(1, 4, 16)
    for low, high, pairs in ((0, 255, True), (5, 4, False), (-200, 200, False)):
        with pytest.raises(KernelError, match="outside what it takes"):
            bound.multiply(codes, codes, extent, False, 1.0, low, high, pairs, 1, out)()
    call = bound.multiply(codes, codes, extent, True, 1.0, 0, 255, False, 1, out)
    call()
    for name in ("images", "pixels", "channels"):
        whole = getattr(extent, name)
        setattr(extent, name, -1)
        with pytest.raises(KernelError, match="outside what it takes"):
            call()
        setattr(extent, name, whole)
