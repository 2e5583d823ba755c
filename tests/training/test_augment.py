"""Crops, flips and orders against a slow reference that works on one image at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq.training.augment import epoch_order, pad_crop_flip

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
unit = st.floats(0, BELOW_ONE, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3])))
    return draw(hnp.arrays(np.uint8, shape)), draw(hnp.arrays(np.float32, (shape[0], 3), elements=unit))


def slow(
    image: NDArray[np.uint8], u: NDArray[np.float32], pad: int, fill: int, flip: bool
) -> NDArray[np.uint8]:
    height, width, _ = image.shape
    out = np.empty_like(image)
    top, left = int(float(u[0]) * (2 * pad + 1)) - pad, int(float(u[1]) * (2 * pad + 1)) - pad
    for y in range(height):
        for x in range(width):
            column = width - 1 - x if flip and u[2] < 0.5 else x
            row, column = y + top, column + left
            out[y, x] = image[row, column] if 0 <= row < height and 0 <= column < width else fill
    return out


@given(batches(), st.integers(0, 6), st.integers(0, 255), st.booleans())
def test_equals_the_slow_reference(batch: Any, pad: int, fill: int, flip: bool) -> None:
    images, uniforms = batch
    before = images.copy()
    got = pad_crop_flip(images, uniforms, pad, fill, flip)
    assert got.dtype == np.uint8
    assert got.shape == images.shape
    for n in range(len(images)):
        assert np.array_equal(got[n], slow(images[n], uniforms[n], pad, fill, flip))
    assert np.array_equal(images, before)


def test_offsets_are_equally_likely_and_reach_both_ends() -> None:
    uniforms = np.zeros((9, 3), np.float32)
    uniforms[:, 0] = uniforms[:, 2] = BELOW_ONE
    uniforms[:, 1] = (np.arange(9) + np.float32(0.5)) / np.float32(9)
    ramp = np.broadcast_to(np.arange(1, 10, dtype=np.uint8)[None, None, :, None], (9, 9, 9, 1))
    got = pad_crop_flip(np.ascontiguousarray(ramp), uniforms, 4, 0)
    assert got[:, 0, 4, 0].tolist() == list(range(1, 10))
    assert not got[:, -4:].any()  # the last row offset leaves `pad` rows of fill at the bottom


@given(st.lists(unit, max_size=40))
def test_order_sorts_the_uniforms_stably(values: list[float]) -> None:
    uniforms = np.array(values, np.float32)
    order = epoch_order(len(values), uniforms)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(len(values)), key=lambda n: (uniforms[n], n))


@pytest.mark.parametrize(
    ("uniforms", "message"),
    [
        (np.zeros((2, 2), np.float32), "shape"),
        (np.zeros((2, 3), np.float64), "float32"),
        (np.ones((2, 3), np.float32), r"\[0, 1\)"),
        (np.full((2, 3), np.nan, np.float32), r"\[0, 1\)"),
        (np.full((2, 3), -0.1, np.float32), r"\[0, 1\)"),
    ],
)
def test_wrong_uniforms_are_refused(uniforms: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_crop_flip(np.zeros((2, 4, 4, 1), np.uint8), uniforms, 1, 0)
    with pytest.raises(ValueError, match=message):
        epoch_order(2, uniforms if uniforms.shape == (2, 2) else uniforms[:, 0])


@pytest.mark.parametrize(
    ("images", "pad", "fill", "message"),
    [
        (np.zeros((2, 4, 4), np.uint8), 1, 0, r"\(N, H, W, C\)"),
        (np.zeros((2, 4, 4, 1), np.float32), 1, 0, "uint8"),
        (np.zeros((2, 4, 4, 1), np.uint8), -1, 0, "pad is -1"),
        (np.zeros((2, 4, 4, 1), np.uint8), 1, 256, "fill is 256"),
    ],
)
def test_wrong_batches_are_refused(images: Any, pad: int, fill: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_crop_flip(images, np.zeros((2, 3), np.float32), pad, fill)
