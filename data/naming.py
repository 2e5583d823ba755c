"""Data under the names of a run: its classes, its targets, or none that it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import few, labelled, numbered
from fedmpq.data.tasks import Task


def named_as(data: Dataset, names: Sequence[str], task: Task) -> Dataset:
    """The same samples with the run's labels, or the run's targets in their order.

    A model that reconstructs its input compares with nothing else, so there the data keep their own names.
    """
    if task == "reconstruction":
        return data
    return labelled(data, names) if data.targets is None else _with_columns(data, tuple(names))


def _with_columns(data: Dataset, names: tuple[str, ...]) -> Dataset:
    """Targets found by their names; those of files without names are the run's already."""
    assert data.targets is not None
    if len(names) != len(data.class_names):
        raise DataError(
            f"the samples have {len(data.class_names)} targets each ({few(data.class_names)}), the model "
            f"{len(names)} ({few(names)}): give as many"
        )
    if numbered(names) or numbered(data.class_names) or len(names) == 1:
        return replace(data, class_names=names)
    if unknown := sorted(set(data.class_names) - set(names)):
        raise DataError(f"target {unknown[0]!r} is none of the model's ({few(names)}): rename it")
    places = [data.class_names.index(name) for name in names]
    return replace(data, class_names=names, targets=np.ascontiguousarray(data.targets[:, places]))
