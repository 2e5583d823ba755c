"""Data sets in one NumPy archive: `x_train`, `y_train`, `x_test`, `y_test`, or `images`, `labels`.

An array `class_names` names the classes; without it they are called "0", "1", ... up to the highest label.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.arrays import label_vector, numbered_classes, pixels
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Size, checked, resized

_KEYS: dict[Split, tuple[str, str]] = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
_KEYS_OF_ONE: dict[Split, tuple[str, str]] = {"train": ("images", "labels")}


class NpzSource:
    """The splits of an .npz file. Labels are read at once, images when they are asked for."""

    def __init__(self, path: Path) -> None:
        arrays = _npz_labels(path)
        names = arrays.pop("class_names", None)
        keys = _KEYS_OF_ONE if "labels" in arrays else _KEYS
        self._path = path
        self._class_names = (
            numbered_classes(path, list(arrays.values()))
            if names is None
            else tuple(str(name) for name in names.ravel())
        )
        self._image_keys = {split: images for split, (images, labels) in keys.items() if labels in arrays}
        self._labels = {split: label_vector(path, arrays[keys[split][1]]) for split in self._image_keys}

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._image_keys)

    def load(self, split: Split, size: Size | None) -> Dataset:
        key = self._image_keys[split]
        images = pixels(self._path, key, _npz_array(self._path, key))
        return resized(checked(self._path, images, self._labels[split], self._class_names), size)


def _npz_labels(path: Path) -> dict[str, NDArray[Any]]:
    """The label arrays whose image arrays are there too, and `class_names` if given."""
    needs = {"labels": "images", "y_train": "x_train", "y_test": "x_test", "class_names": "class_names"}
    found = {key: _npz_array(path, key) for key, images in needs.items() if {key, images} <= _npz_keys(path)}
    if not found.keys() - {"class_names"}:
        raise DataError(
            f"{path}: no images+labels and no x_train+y_train inside: save it with np.savez and these names"
        )
    return found


def _npz_keys(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz ({error}): save it with np.savez") from None


def _npz_array(path: Path, key: str) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            array: NDArray[Any] = archive[key]
            return array
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot read array {key} ({error}): save it again with np.savez") from None
