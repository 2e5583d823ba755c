"""Labelled samples as they were measured: floats or integers that become 8-bit codes by the run's range.

Layouts: pixels are (height, width, channels). What is measured otherwise has its channels first, as torch has
it: (C, H, W), (C, L) for a series of L steps, (F,) for F features. A series becomes an image of height 1 and
width L, features one of a single pixel with F channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset, Labels, Targets, check_targets, describe
from fedmpq.data.value_range import GREATEST, PIXELS, ValueRange, spanning

KINDS = "uint8, int16 or floats"


@dataclass(frozen=True, eq=False)
class Samples:
    """N labelled samples: `values` (N, H, W, C), uint8 codes or measured numbers; the rest as in `Dataset`.

    `name` is what errors call them.
    """

    name: str
    values: NDArray[Any]
    labels: Labels
    class_names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    targets: Targets | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 4 or not self.values.size:
            raise DataError(
                f"{self.name}: samples are {describe(self.values)}, must be (N, H, W, C), at least one"
            )
        if not self.is_coded and self.values.dtype != np.int16 and self.values.dtype.kind != "f":
            raise DataError(f"{self.name}: samples are {self.values.dtype}, must be {KINDS}: convert them")
        if self.targets is not None:
            try:
                check_targets(self.targets, len(self), len(self.class_names))
            except DataError as error:
                raise DataError(f"{self.name}: {error}") from None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_coded(self) -> bool:
        """Whether they are 8-bit codes already."""
        return bool(self.values.dtype == np.uint8)

    def subset(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Samples:
        """The samples and labels at `indices`, in that order."""
        chosen = np.asarray(indices, np.int64)
        targets = None if self.targets is None else self.targets[chosen]
        return replace(self, values=self.values[chosen], labels=self.labels[chosen], targets=targets)

    def bounds(self) -> ValueRange | None:
        """The least and the greatest value of each channel; None of codes, which have no other range."""
        if self.is_coded:
            return None
        self._check_finite()
        return spanning(self.values.min(axis=(0, 1, 2)), self.values.max(axis=(0, 1, 2)))

    def coded(self, value_range: ValueRange | None = None) -> Dataset:
        """As codes of that range. Without one codes stay as they are, and floats must lie in 0..1."""
        try:
            codes = self._codes(value_range)
            return Dataset(codes, self.labels, self.class_names, self.skipped, self.targets)
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _codes(self, value_range: ValueRange | None) -> NDArray[np.uint8]:
        if self.is_coded:
            return np.ascontiguousarray(self.values)
        self._check_finite()
        if value_range is None:
            low, high = self.values.min(), self.values.max()
            if self.values.dtype.kind != "f" or not 0.0 <= float(low) <= float(high) <= 1.0:
                raise DataError(
                    f"the values are {self.values.dtype} and span {low}..{high}, and 8-bit codes need a "
                    "range: floats in 0..1 have one, for others the run gives data_range, LOW..HIGH or boards"
                )
        return (value_range or PIXELS).codes(self.values)

    def _check_finite(self) -> None:
        if self.values.dtype.kind == "f" and not (np.abs(self.values) <= GREATEST).all():
            raise DataError(f"the values hold NaN, infinity or more than {GREATEST:g}: drop these samples")


def channels_first(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """(N, C, H, W), (N, C, L) or (N, F) as (N, H, W, C)."""
    if array.ndim == 2:
        return array[:, None, None, :]
    if array.ndim == 3:
        return array.transpose(0, 2, 1)[:, None]
    if array.ndim == 4:
        return array.transpose(0, 2, 3, 1)
    raise DataError(
        f"{name}: samples have shape {array.shape}, must be (N, features), (N, channels, length) or "
        "(N, channels, height, width)"
    )
