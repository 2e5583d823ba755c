"""Data sets in one NumPy archive, by the names of its arrays:

| samples, labels | are |
|---|---|
| `images`, `labels` | training images (N, H, W) or (N, H, W, C) |
| `x_train`, `y_train`, `x_test`, `y_test` | images as above, or features (N, F) |
| `samples`, `labels`, `samples_test`, `labels_test` | channels first: (N, C, H, W), (N, C, L) or (N, F) |

They are uint8, int16 or floats. Labels are whole numbers (N,); floats, or several numbers for each sample,
are targets (module `answers`), as is what is called `targets` or `targets_test`; a model that reconstructs
its input needs neither. An array `class_names` names the classes or targets; without it they are called "0",
"1", ... up to the highest label.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.answers import is_labels, target_rows
from fedmpq.data.arrays import check_memory, image_values, label_vector, numbered_classes
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import MAX_CLASSES, DataError, Dataset, Labels, Size, Targets, resized
from fedmpq.data.fitting import Form
from fedmpq.data.samples import Samples, channels_first
from fedmpq.data.value_range import ValueRange

_KEYS: tuple[tuple[Split, str, tuple[str, ...]], ...] = (
    ("train", "images", ("labels", "targets")),
    ("train", "samples", ("labels", "targets")),
    ("test", "samples_test", ("labels_test", "targets_test")),
    ("train", "x_train", ("y_train",)),
    ("test", "x_test", ("y_test",)),
)
_CHANNELS_FIRST = ("samples", "samples_test")


class NpzSource:
    """The splits of an .npz file. Labels are read at once, samples when they are asked for."""

    def __init__(self, path: Path) -> None:
        there = _npz_keys(path)
        found: dict[Split, tuple[str, str | None]] = {}
        for split, values, answers in _KEYS:
            if values in there:
                found.setdefault(split, (values, _only_one(path, there.intersection(answers))))
        if not found:
            raise DataError(
                f"{path}: no images, no samples and no x_train inside: save it with np.savez and these "
                "names, and labels or targets beside them"
            )
        arrays = {split: _npz_array(path, key) for split, (_, key) in found.items() if key is not None}
        self._path = path
        self._keys = {split: values for split, (values, _) in found.items()}
        self._targets = {
            split: target_rows(str(path), array)
            for split, array in arrays.items()
            if str(found[split][1]).startswith("targets") or not is_labels(array)
        }
        self._labels = {
            split: label_vector(path, array) for split, array in arrays.items() if split not in self._targets
        }
        self._class_names = (
            _names(path, _npz_array(path, "class_names"))
            if "class_names" in there
            else _numbered(path, self._labels, self._targets)
        )

    def splits(self) -> tuple[Split, ...]:
        return tuple(split for split in ("train", "test") if split in self._keys)

    def load(self, split: Split, size: Size | None) -> Dataset:
        return resized(self.samples(split).coded(), size)

    def samples(self, split: Split, form: Form | None = None) -> Samples:
        key, name = self._keys[split], str(self._path)
        array = _npz_array(self._path, key)
        if not len(array):
            raise DataError(f"{name}: holds no samples: at least one is needed")
        if key in _CHANNELS_FIRST or array.ndim == 2:
            values = channels_first(f"{name}: array {key}", array)
        else:
            values = image_values(self._path, key, array)
        zeros = np.zeros(len(values), np.int64)
        labels, targets = self._labels.get(split, zeros), self._targets.get(split)
        if targets is None and split not in self._labels:
            targets = np.zeros((len(values), 0), np.float32)
        return Samples(name, values, labels, self._class_names, targets=targets)

    def bounds(self, split: Split) -> ValueRange | None:
        return self.samples(split).bounds()


def _numbered(
    path: Path, labels: Mapping[Split, Labels], targets: Mapping[Split, Targets]
) -> tuple[str, ...]:
    """Targets and classes without names are called by their numbers."""
    for rows in targets.values():
        return tuple(str(number) for number in range(rows.shape[1]))
    return numbered_classes(path, labels.values())


def _only_one(path: Path, answers: set[str]) -> str | None:
    """The array that says what is known of the samples; None: nothing is."""
    if len(answers) > 1:
        raise DataError(f"{path}: holds {' and '.join(sorted(answers))}: keep one of them")
    return next(iter(answers), None)


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
