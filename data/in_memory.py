"""Data that a program holds already: arrays, or anything that gives (image, label) pairs by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Size, resized


@runtime_checkable
class Indexed(Protocol):
    """What `torch.utils.data.Dataset` of a known length offers: `(image, label)` by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class InMemory:
    """Data sets that are there already."""

    def __init__(self, train: Dataset, test: Dataset | None = None) -> None:
        self._sets: dict[Split, Dataset] = {"train": train}
        if test is not None:
            self._sets["test"] = test

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._sets)

    def load(self, split: Split, size: Size | None) -> Dataset:
        return resized(self._sets[split], size)


def from_arrays(
    images: NDArray[Any], labels: NDArray[Any] | Sequence[int], class_names: Sequence[str] = ()
) -> Dataset:
    """`images` uint8 `(N, H, W, C)` or grey `(N, H, W)`, and the label of each."""
    pixels, numbers = np.asarray(images), np.asarray(labels)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise DataError(
            f"the images are {pixels.dtype} of shape {pixels.shape}; give uint8 of shape (N, H, W, C): "
            "pixels in 0..255, before any normalisation"
        )
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) != len(pixels):
        raise DataError(
            f"the labels are {numbers.dtype} of shape {numbers.shape}; give one whole number for each of the "
            f"{len(pixels)} images"
        )
    if len(numbers) and int(numbers.min()) < 0:
        raise DataError(f"label {int(numbers.min())} is negative; number the classes from 0")
    names = tuple(class_names) or tuple(str(label) for label in range(int(numbers.max(initial=-1)) + 1))
    shaped = pixels[..., None] if pixels.ndim == 3 else pixels
    return Dataset(np.ascontiguousarray(shaped), numbers.astype(np.int64), names)


def from_pairs(pairs: Indexed) -> Dataset:
    """All `(image, label)` pairs of an object, read once; images are PIL's, or uint8 arrays `(H, W, C)`.

    The classes are called as the object's `classes` says, where it has them.
    """
    if len(pairs) == 0:
        raise DataError("the data set is empty; give at least two images")
    images, labels = [], []
    for index in range(len(pairs)):
        image, label = _pair(pairs, index)
        images.append(image)
        labels.append(label)
    if len({image.shape for image in images}) > 1:
        raise DataError("the images differ in size; resize them to one size")
    return from_arrays(np.stack(images), np.array(labels, np.int64), getattr(pairs, "classes", ()))


def _pair(pairs: Indexed, index: int) -> tuple[NDArray[np.uint8], int]:
    try:
        image, label = pairs[index]
        return _pixels(image), int(label)
    except (TypeError, ValueError) as error:
        raise DataError(f"item {index} of the data set is no pair of an image and a label: {error}") from None


def _pixels(image: Any) -> NDArray[np.uint8]:
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise DataError(
            f"its image is {array.dtype} of shape {array.shape}; give uint8 pixels (H, W, C), so no ToTensor "
            "and no normalisation: FedMPQ normalises by itself"
        )
    return array


class PairsSource:
    """A source of `(image, label)` pairs: all of them are training images."""

    def __init__(self, pairs: Indexed) -> None:
        self._pairs = pairs

    def splits(self) -> tuple[Literal["train"]]:
        return ("train",)

    def load(self, split: str, size: Size | None) -> Dataset:
        """All pairs, at the size they have."""
        return from_pairs(self._pairs)
