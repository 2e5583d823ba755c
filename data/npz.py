"""Data sets in one NumPy archive: `x_train`, `y_train`, `x_test`, `y_test`, or `images`, `labels`.

An array `class_names` names the classes; without it they are called "0", "1", ... up to the highest label.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.arrays import check_memory, label_vector, numbered_classes, pixels
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import MAX_CLASSES, DataError, Dataset, Size, checked, resized

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
            numbered_classes(path, list(arrays.values())) if names is None else _names(path, names)
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
    except Exception as error:  # as in _npz_array
        raise DataError(f"{path}: not a readable .npz ({_reason(error)}): save it with np.savez") from None


def _npz_array(path: Path, key: str) -> NDArray[Any]:
    """An array of the archive, if what its header says fits both the file and the memory."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            shape, dtype = _header(file)
            need, follow = math.prod(shape) * dtype.itemsize, archive.getinfo(f"{key}.npy").file_size
        # While they become pixels, floats are there in three forms.
        check_memory(path, key, need + (9 * math.prod(shape) if dtype.kind == "f" else 0))
        if need >= follow:
            raise ValueError(
                f"its header says {shape} of {dtype}, but {follow} bytes are not enough for that"
            )
        with np.load(path, allow_pickle=False) as arrays:
            array: NDArray[Any] = arrays[key]
            return array
    except DataError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and NumPy raise nearly anything
        raise DataError(
            f"{path}: cannot read array {key} ({_reason(error)}): save it again with np.savez"
        ) from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that a file holds, without reading it."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"version {version} of NumPy's format is not one that is read here")
    shape, _, dtype = read[version](file)
    return shape, dtype


def _names(path: Path, names: NDArray[Any]) -> tuple[str, ...]:
    if not 0 < names.size <= MAX_CLASSES or names.dtype.kind not in "USiu":
        raise DataError(
            f"{path}: class_names is {names.dtype} of {names.size} elements, must be 1..{MAX_CLASSES} texts: "
            "save the names of the classes"
        )
    return tuple(_text(name) for name in names.ravel())


def _text(name: object) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _reason(error: Exception) -> str:
    """One line."""
    return " ".join(str(error).split()) or type(error).__name__
