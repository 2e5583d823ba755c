"""What an array says of samples: their classes, numbers to be compared with, or nothing.

| array | is |
|---|---|
| whole numbers (N,) | a label for each sample |
| floats or truth values (N,) or (N, K), whole numbers (N, K) with K above 1 | K targets for each |
| none | nothing: targets (N, 0) |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import MAX_CLASSES, DataError, Labels, Targets, describe

Answers = tuple[Labels, Targets | None, tuple[str, ...]]
"""Labels, targets where there are no labels or none, and the names of what both count."""
MAX_TARGETS = 65536


def read_answers(
    name: str, array: NDArray[Any] | Sequence[Any] | None, samples: int, names: Sequence[str] = ()
) -> Answers:
    """What is known of so many samples; errors call them by `name`. Without names there are numbers."""
    if array is None:
        return np.zeros(samples, np.int64), np.zeros((samples, 0), np.float32), tuple(names) or ("0",)
    given = np.asarray(array)
    if given.dtype.kind not in "iufb" or given.ndim not in (1, 2) or len(given) != samples:
        raise DataError(
            f"{name}: the labels are {describe(given)}; give one whole number for each of the {samples} "
            "samples, or a row of numbers as its targets"
        )
    if not is_labels(given):
        targets = target_rows(name, given)
        return np.zeros(samples, np.int64), targets, tuple(names) or _numbers(targets.shape[1])
    labels = given.reshape(-1).astype(np.int64)
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{name}: label {int(labels.min())} is negative; number the classes from 0")
    return labels, None, tuple(names) or _numbers(int(labels.max(initial=-1)) + 1)


def is_labels(array: NDArray[Any]) -> bool:
    """Whether it has a class for each sample, and not targets."""
    return array.dtype.kind in "iu" and (array.ndim == 1 or array.shape[1] == 1)


def target_rows(name: str, array: NDArray[Any]) -> Targets:
    """Numbers (N,) or (N, K) as float32 (N, K)."""
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2) or not array.size:
        raise DataError(f"{name}: targets are {describe(array)}, must be numbers of shape (N,) or (N, K)")
    rows = array.reshape(len(array), -1).astype(np.float32)
    if rows.shape[1] > MAX_TARGETS:
        raise DataError(f"{name}: {rows.shape[1]} targets for each sample, at most {MAX_TARGETS} are taken")
    return rows


def _numbers(count: int) -> tuple[str, ...]:
    if count > MAX_CLASSES:
        raise DataError(f"label {count - 1} is too large: at most {MAX_CLASSES} classes, numbered from 0")
    return tuple(str(number) for number in range(count))
