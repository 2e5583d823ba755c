"""The data set itself: its checks, its normalisation, and resizing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset, Images, resize
from tests.data.files import pixels

small_images = hnp.arrays(
    np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3]))
)


# The data set itself


def test_subset_keeps_order_and_classes() -> None:
    data = Dataset(pixels(4, 2, 2, 1), np.array([0, 1, 1, 0]), ("a", "b"), (("x.jpg", "broken"),))
    part = data.subset([3, 1])
    assert np.array_equal(part.images, data.images[[3, 1]])
    assert part.labels.tolist() == [0, 1]
    assert (part.class_names, part.skipped) == (data.class_names, data.skipped)
    assert len(data.subset([])) == 0
    assert data.image_shape == (2, 2, 1)


def test_subset_refuses_a_mask() -> None:
    data = Dataset(pixels(2, 2, 2, 1), np.array([0, 1]), ("a", "b"))
    with pytest.raises(DataError, match="flatnonzero"):
        data.subset(np.array([True, False]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 2, 2, 1), np.float32), np.zeros(2, np.int64), "images are float32"),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(2, np.int64), "must be uint8 of shape"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.zeros(3, np.int64), "one for each of 2"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.zeros(2, np.int32), "must be int64"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 2]), "0..1"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.array([-1, 0]), "0..1"),
    ],
)
def test_data_set_refuses_inconsistent_arrays(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset(images, labels, ("a", "b"))


@given(small_images)
def test_normalisation_is_the_mean_and_deviation_of_all_pixels(images: NDArray[np.uint8]) -> None:
    scale, zero_point = Dataset(images, np.zeros(len(images), np.int64), ("a",)).normalisation()
    values = images.astype(np.float64)
    assert abs(zero_point - values.mean()) <= 0.5 + 1e-9
    assert scale == float(np.float32(scale))
    assert scale == (1 / 64 if values.min() == values.max() else pytest.approx(1 / values.std(), rel=1e-6))


def test_normalisation_counts_across_pieces() -> None:
    images = pixels(5, 700, 700, 1)  # more than one piece of 2^20 pixels
    scale, zero_point = Dataset(images, np.zeros(5, np.int64), ("a",)).normalisation()
    assert scale == pytest.approx(1 / images.std(), rel=1e-6)
    assert zero_point == round(float(images.mean()))


def test_normalisation_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="at least one image"):
        Dataset(pixels(0, 2, 2, 1), np.zeros(0, np.int64), ("a",)).normalisation()


# Resizing


@given(small_images)
def test_halving_is_the_rounded_mean_of_four(small: NDArray[np.uint8]) -> None:
    height, width = small.shape[1:3]
    images = np.repeat(np.repeat(small, 2, axis=1), 2, axis=2)
    images[:, 1::2, ::2] = 255 - images[:, 1::2, ::2]
    halved = resize(images, (height, width))
    for n, y, x, c in np.ndindex(*small.shape):
        four = images[n, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2, c]
        assert halved[n, y, x, c] == int(float(four.sum()) / 4 + 0.5)


@given(small_images, st.integers(1, 7), st.integers(1, 7))
def test_resizing_keeps_the_range_and_flat_colours(
    images: NDArray[np.uint8], height: int, width: int
) -> None:
    out = resize(images, (height, width))
    assert out.shape == (len(images), height, width, images.shape[3])
    for n, c in np.ndindex(len(images), images.shape[3]):
        assert (
            images[n, :, :, c].min()
            <= out[n, :, :, c].min()
            <= out[n, :, :, c].max()
            <= images[n, :, :, c].max()
        )


def test_a_third_is_the_mean_of_nine() -> None:
    images = pixels(3, 12, 9, 3)
    exact = images.reshape(3, 4, 3, 3, 3, 3).mean(axis=(2, 4))
    # BOX rounds once along each axis.
    assert np.abs(resize(images, (4, 3)) - exact).max() <= 1.0


@pytest.mark.parametrize("size", [0, -3, (4, 0), 5000])
def test_impossible_sizes_are_refused(size: Any) -> None:
    with pytest.raises(DataError, match=r"1\.\.4096"):
        resize(pixels(1, 4, 4, 1), size)


@given(
    old=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    new=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    seed=st.integers(0, 2**32 - 1),
)
def test_resizing_goes_along_rows_and_then_along_columns(
    old: tuple[int, int], new: tuple[int, int], seed: int
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, old, np.uint8)
    expected = image if old == new else means_of_rows(means_of_rows(image, new[1]).T, new[0]).T
    if old == (2 * new[0], 2 * new[1]):
        expected = ((image.reshape(new[0], 2, new[1], 2).sum((1, 3), np.int64) + 2) >> 2).astype(np.uint8)
    np.testing.assert_array_equal(resize(image[None, :, :, None], new)[0, :, :, 0], expected)


def means_of_rows(image: Images, width: int) -> Images:
    """Each new pixel the mean of those whose centres lie in its part, all counting the same in 2^-22."""
    old = image.shape[1]
    if old == width:
        return image
    columns, scale = [], Fraction(old, width)
    for place in range(width):
        half = max(scale, Fraction(1)) / 2
        distances = [i + Fraction(1, 2) - (place + Fraction(1, 2)) * scale for i in range(old)]
        # Where a centre lies on an edge, the last bit of a float decides to which part it belongs.
        assume(half not in map(abs, distances))
        within = [i for i, distance in enumerate(distances) if abs(distance) < half]
        total = image[:, within].astype(np.int64).sum(1)
        share = round(Fraction(1 << 22, len(within)))
        columns.append((share * total + (1 << 21)) >> 22)
    return np.stack(columns, 1).astype(np.uint8)
