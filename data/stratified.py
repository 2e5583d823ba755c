"""Parts of a data set with the same proportions of classes as the whole."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset, Labels
from fedmpq.data.samples import Samples

Cut = TypeVar("Cut", Dataset, Samples)


def stratified_subset(labels: Labels, count: int, seed: int) -> NDArray[np.int64]:
    """Sorted indices of `count` labels, chosen at random within each class.

    Class c gives floor(n_c * count / N), and one more where the remainder is largest (the lower class
    first) until there are `count`. The draws come from Philox(seed).
    """
    if not 0 <= count <= len(labels):
        raise DataError(f"cannot choose {count} of {len(labels)} images: ask for 0..{len(labels)}")
    rng = np.random.Generator(np.random.Philox(seed))
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    shares = [divmod(len(indices) * count, len(labels)) for indices in members]
    by_remainder = sorted(range(len(shares)), key=lambda c: -shares[c][1])
    extra = set(by_remainder[: count - sum(quota for quota, _ in shares)])
    chosen = [
        rng.permutation(indices)[: quota + (c in extra)]
        for c, (indices, (quota, _)) in enumerate(zip(members, shares, strict=True))
    ]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def stratified_split(data: Cut, test_share: float, seed: int) -> tuple[Cut, Cut]:
    """(train, test) with rint(test_share * N) test images, class by class; `skipped` stays with train."""
    test_count = min(max(round(test_share * len(data)), 1), len(data) - 1)
    if test_count < 1:
        raise DataError(f"{len(data)} image cannot be divided into training and test: at least 2 are needed")
    chosen = stratified_subset(data.labels, test_count, seed)
    rest = np.setdiff1d(np.arange(len(data)), chosen)
    test = dataclasses.replace(data.subset(chosen), skipped=())
    return data.subset(rest), test
