"""MNIST's idx files: `train-images-idx3-ubyte[.gz]`, `train-labels-idx1-ubyte[.gz]`, and `t10k` or `test`."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpq.data.arrays import check_memory, image_values, label_vector, numbered_classes
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Images, Size, checked, resized

_PREFIXES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("t10k", "test")}


class IdxSource:
    """The splits of a folder of idx files; `splits` is empty where there are none."""

    def __init__(self, folder: Path) -> None:
        files = {
            split: (_idx_file(folder, split, "images", 3), _idx_file(folder, split, "labels", 1))
            for split in _PREFIXES
        }
        pairs = {split: (images, labels) for split, (images, labels) in files.items() if images and labels}
        if not pairs and any(images or labels for images, labels in files.values()):
            raise DataError(
                f"{folder}: idx files come in pairs: put images-idx3-ubyte beside labels-idx1-ubyte"
            )
        self._images = {split: images for split, (images, _) in pairs.items()}
        self._labels = {
            split: label_vector(labels, _read_idx(labels, 1)) for split, (_, labels) in pairs.items()
        }
        self._class_names = numbered_classes(folder, self._labels.values())

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._images)

    def load(self, split: Split, size: Size | None) -> Dataset:
        path = self._images[split]
        images = np.ascontiguousarray(image_values(path, "images", _read_idx(path, 3)))
        return resized(checked(path, images, self._labels[split], self._class_names), size)


def _idx_file(folder: Path, split: Split, kind: str, dimensions: int) -> Path | None:
    candidates = (
        folder / f"{prefix}-{kind}{separator}idx{dimensions}-ubyte{suffix}"
        for prefix in _PREFIXES[split]
        for separator in "-."
        for suffix in ("", ".gz")
    )
    return next((path for path in candidates if path.is_file()), None)


def _read_idx(path: Path, dimensions: int) -> Images:
    """idx: bytes 0, 0, type (8 = uint8), rank; `rank` big-endian uint32 sizes; the values in C order."""
    opener: Callable[[Path, Literal["rb"]], Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                raise DataError(
                    f"{path}: not an idx{dimensions} file of bytes (magic {magic.hex()}): download it again"
                )
            shape = tuple(int(n) for n in np.frombuffer(file.read(4 * dimensions), ">u4"))
            size = math.prod(shape)
            check_memory(path, "values", 2 * size)
            payload = file.read(size + 1)
    except DataError:
        raise
    except Exception as error:  # a damaged gzip stream makes gzip and zlib raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: unreadable ({reason}): download it again") from None
    if len(shape) != dimensions or len(payload) != size:
        raise DataError(
            f"{path}: the header says shape {shape}, but {size} bytes are not what follows: download it again"
        )
    array: Images = np.frombuffer(payload, np.uint8).reshape(shape).copy()
    return array
