"""The board's own images as a model takes them: labelled by the model's classes, at the model's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Size, resized
from fedmpq.data.open_source import load, splits
from fedmpq.model.graph import Graph

MAX_EVALUATED = 1000
"""Samples that a received model is measured on at most."""


@dataclass(frozen=True)
class BoardData:
    """What the board trains on, and what it measures a received model on."""

    train: Dataset
    evaluation: Dataset

    def labelled(self, class_names: Sequence[str]) -> BoardData:
        return BoardData(labelled(self.train, class_names), labelled(self.evaluation, class_names))

    def fitted(self, graph: Graph) -> BoardData:
        return BoardData(fitted(self.train, graph), fitted(self.evaluation, graph))


def load_board_data(data: str, test_data: str | None, size: Size | None) -> BoardData:
    """The data sets that this board's command line names, by paths or as `package.module:Class`.

    Without `test_data` a share of the training images stands in for it.
    """
    train = load(data, "train", size)
    if test_data is None:
        return BoardData(train, _share(train))
    split: Split = "test" if "test" in splits(test_data) else "train"
    return BoardData(train, _share(load(test_data, split, size)))


def labelled(data: Dataset, class_names: Sequence[str]) -> Dataset:
    """The same images under the model's labels, found by the classes' names.

    Labels of files without class names (their classes are called "0", "1", ...) are the model's already.
    A class without images need not be one of the model's.
    """
    label_of = {name: label for label, name in enumerate(class_names)}
    held = [data.class_names[label] for label in np.unique(data.labels)]
    unknown = [name for name in held if name not in label_of]
    numbered = data.class_names == tuple(str(label) for label in range(len(data.class_names)))
    if not unknown:
        table = np.array([label_of.get(name, -1) for name in data.class_names], np.int64)
        return Dataset(data.images, table[data.labels], tuple(class_names), data.skipped)
    if not numbered:
        raise DataError(
            f"class {unknown[0]!r} is none of the model's {len(class_names)} classes "
            f"({_few(class_names)}): rename its folder or take it out of this board's data"
        )
    if (greatest := int(data.labels.max())) >= len(class_names):
        raise DataError(
            f"label {greatest} is none of the model's: its {len(class_names)} classes ({_few(class_names)}) "
            f"end at {len(class_names) - 1}; number the labels as the model does"
        )
    return Dataset(data.images, data.labels, tuple(class_names), data.skipped)


def fitted(data: Dataset, graph: Graph) -> Dataset:
    """The images at the model's height and width; a model of another number of channels is refused."""
    image = graph.input
    channels = data.image_shape[2]
    if channels != image.channels:
        raise DataError(
            f"this board's images have {channels} channels, the model takes {image.channels}: "
            "give it images of that colour mode"
        )
    return resized(data, (image.height, image.width))


def _share(data: Dataset) -> Dataset:
    """At most MAX_EVALUATED images, at random, because files may be sorted, but always the same ones."""
    if len(data) <= MAX_EVALUATED:
        return data
    return data.subset(np.sort(np.random.default_rng(0).permutation(len(data))[:MAX_EVALUATED]))


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ..." if len(names) > 5 else shown
