"""Data as a task needs them: labels, numbers to compare a model's outputs with, or neither.

| task | needs | made of labels, where there are no targets |
|---|---|---|
| classification | labels | – |
| multi_label | targets, 0 or 1 for each label | one label for each class, 1 where it is the sample's |
| regression | targets, any numbers | the name of the sample's class, where names are numbers |
| reconstruction | nothing | – |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset, Targets
from fedmpq.data.samples import Samples

Task = Literal["classification", "multi_label", "regression", "reconstruction"]
TASKS: tuple[Task, ...] = get_args(Task)
Data = TypeVar("Data", Dataset, Samples)

NORMAL = "normal"
VALUE = "value"
"""What a regression's output is called that has no other name."""


def for_task(data: Data, task: Task) -> Data:
    """The same samples with what the task compares outputs with; DataError says what is missing."""
    if task == "classification":
        if data.targets is not None:
            has = f"{data.targets.shape[1]} targets each" if data.targets.shape[1] else "no labels"
            raise DataError(
                f"the samples have {has}: classification needs a class for each; give labels (of a table "
                "with ?label=), or choose another task (regression, multi_label, reconstruction)"
            )
        return data
    if task == "reconstruction":
        return _without_targets(data)
    if data.targets is None:
        return _one_for_each_class(data) if task == "multi_label" else _value_of_class(data)
    if not data.targets.shape[1]:
        raise DataError(f"the samples have no targets: {task} needs some for each")
    if task == "multi_label" and not ((data.targets == 0) | (data.targets == 1)).all():
        raise DataError(
            f"targets span {data.targets.min():g}..{data.targets.max():g}, multi_label needs 0 or 1 for each "
            "label: convert them, or choose the task regression"
        )
    return data


def _without_targets(data: Data) -> Data:
    """The samples alone: of one kind, unless their labels tell them apart."""
    if data.targets is None or not data.targets.shape[1]:
        return replace(data, targets=None)
    return replace(data, labels=np.zeros_like(data.labels), class_names=(NORMAL,), targets=None)


def normal_class(class_names: tuple[str, ...]) -> int | None:
    """Where samples are normal or anomalies, the label of the normal ones: of two classes the one that is
    called "normal", or else the first. None: there are not two classes."""
    if len(class_names) != 2:
        return None
    return class_names.index(NORMAL) if NORMAL in class_names else 0


def anomalies(data: Dataset) -> NDArray[np.bool_] | None:
    """Which samples are anomalies; None: they are not told apart."""
    normal = normal_class(data.class_names)
    return None if normal is None else data.labels != normal


def trained_on(data: Data, task: Task) -> Data:
    """What is trained on: all samples, but of anomalies that are labelled as such none."""
    normal = normal_class(data.class_names) if task == "reconstruction" else None
    if normal is None or not (data.labels != normal).any():
        return data
    return data.subset(np.flatnonzero(data.labels == normal))


def _one_for_each_class(data: Data) -> Data:
    targets: Targets = np.eye(len(data.class_names), dtype=np.float32)[data.labels]
    return replace(data, targets=targets)


def _value_of_class(data: Data) -> Data:
    try:
        values = np.array([float(name) for name in data.class_names], np.float32)
    except ValueError:
        raise DataError(
            f"the samples have classes such as {data.class_names[0]!r} and no targets: regression needs a "
            "number for each, in an array or columns of targets, or classes whose names are numbers"
        ) from None
    labels, targets = np.zeros_like(data.labels), values[data.labels][:, None]
    return replace(data, labels=labels, class_names=(VALUE,), targets=targets)
