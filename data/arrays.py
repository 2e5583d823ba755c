"""Arrays from files as samples and labels: which shapes and types are accepted, and what they become."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import MAX_CLASSES, DataError, Labels, describe
from fedmpq.system.memory import memory_given, size_text


def check_memory(path: Path, key: str, need: int) -> None:
    """Refuses an array before it is read, if it needs more memory than this process may take."""
    if need > (given := memory_given()):
        raise DataError(
            f"{path}: array {key} needs {size_text(need)} of memory, {size_text(given)} may be taken: "
            "save fewer or smaller samples, or give more memory"
        )


def image_values(path: Path, key: str, array: NDArray[Any]) -> NDArray[Any]:
    """Images (N, H, W) or (N, H, W, C) as (N, H, W, C)."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] > 16 or not all(array.shape[1:]):
        raise DataError(
            f"{path}: array {key} has shape {array.shape}, must be (N, H, W) or (N, H, W, 1..16): call it "
            "samples if its channels come first"
        )
    return array


def label_vector(path: Path, array: NDArray[Any]) -> Labels:
    """Integers of any type, (N,) or (N, 1), as int64 of shape (N,)."""
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size != array.shape[0]:
        raise DataError(f"{path}: labels are {describe(array)}, must be integers of shape (N,): convert them")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < MAX_CLASSES:
        raise DataError(
            f"{path}: labels span {array.min()}..{array.max()}, must lie in 0..{MAX_CLASSES - 1}: "
            "renumber them"
        )
    return array.reshape(-1).astype(np.int64)


def numbered_classes(path: Path, arrays: Iterable[NDArray[Any]]) -> tuple[str, ...]:
    """Classes without names: "0", "1", ... up to the highest label of any split."""
    highest = max((int(label_vector(path, array).max(initial=0)) for array in arrays), default=0)
    return tuple(str(label) for label in range(highest + 1))
