"""The board's own samples: where they are, how many, and what becomes of them for a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedmpq.data.data_source import DataSource, FormSource, MeasuredSource, Split, load_form
from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fingerprint import Fingerprint, fingerprint
from fedmpq.data.fitting import Form, fitted, without_classes
from fedmpq.data.naming import named_as
from fedmpq.data.open_source import open_source
from fedmpq.data.tasks import for_task, trained_on
from fedmpq.data.value_range import ValueRange
from fedmpq.model.calibration import MIN_SAMPLES

MAX_EVALUATED = 1000
"""Samples that a received model is measured on at most."""


@dataclass(frozen=True)
class BoardData:
    """What the board trains on, and what it measures a received model on, as a model takes it."""

    train: Dataset
    evaluation: Dataset


class BoardSource(Protocol):
    """Where the board's samples come from. They are read when a model says in which form it takes them."""

    @property
    def samples(self) -> int:
        """How many there are, as far as that is known without reading them."""
        ...

    @property
    def bounds(self) -> ValueRange | None:
        """The least and greatest measured values; None of samples that are 8-bit codes."""
        ...

    def load(self, form: Form, class_names: Sequence[str]) -> BoardData:
        """The samples in the model's form and under its labels; DataError says why that cannot be."""
        ...

    def has_changed(self) -> bool:
        """Whether there are other files than when they were last loaded."""
        ...


class NamedData:
    """The data that this board's command line names, by paths or as `package.module:Class`.

    Without `test_data` a share of the training samples stands in for it. Samples of the classes in `skip` are
    left out.
    """

    def __init__(self, data: str, test_data: str | None = None, skip: Collection[str] = ()) -> None:
        self._data, self._test_data, self._skip = data, test_data, frozenset(skip)
        source = open_source(data)
        self.bounds = source.bounds("train") if isinstance(source, MeasuredSource) else None
        self.samples = _count(source)
        self._sources = {data: source}
        self._loaded: Fingerprint = frozenset()
        if self.samples < MIN_SAMPLES:
            raise DataError(f"{data} has {self.samples} sample; training needs at least {MIN_SAMPLES}")

    def has_changed(self) -> bool:
        return fingerprint(self._data) != self._loaded

    def load(self, form: Form, class_names: Sequence[str]) -> BoardData:
        # Before reading: a file that comes meanwhile is seen the next time.
        self._loaded = fingerprint(self._data)
        train = trained_on(self._fitted(self._data, "train", form, class_names), form.task)
        if len(train) < MIN_SAMPLES:
            raise DataError(
                f"{self._data}: {len(train)} samples can be used, training needs at least {MIN_SAMPLES}"
            )
        if self._test_data is None:
            return BoardData(train, _share(train))
        test = self._fitted(self._test_data, "test", form, class_names)
        return BoardData(train, _share(test))

    def _fitted(self, data: str, split: Split, form: Form, class_names: Sequence[str]) -> Dataset:
        source = self._source(data)
        there: Split = split if split in source.splits() else "train"
        found = load_form(source, data, there, form)
        # The test data need not have the classes that are left out.
        skip = self._skip if data == self._data else self._skip & set(found.class_names)
        return named_as(without_classes(found, skip), class_names, form.task)

    def _source(self, data: str) -> DataSource:
        """Opened anew, for an archive's labels are read then; but one of photos knows what it has decoded."""
        if not isinstance(self._sources.get(data), FormSource):
            self._sources[data] = open_source(data)
        return self._sources[data]


class HeldData:
    """Data sets that are in memory already."""

    def __init__(self, train: Dataset, evaluation: Dataset | None = None) -> None:
        self._train, self._evaluation = train, train if evaluation is None else evaluation
        self.bounds: ValueRange | None = None
        self.samples = len(train)

    def load(self, form: Form, class_names: Sequence[str]) -> BoardData:
        train, evaluation = (
            named_as(for_task(fitted(data, form), form.task), class_names, form.task)
            for data in (self._train, self._evaluation)
        )
        return BoardData(trained_on(train, form.task), evaluation)

    def has_changed(self) -> bool:
        return False


def _count(source: DataSource) -> int:
    """How many training samples there are, as far as that is known before a model says their form."""
    if isinstance(source, FormSource):
        return source.count("train")
    if isinstance(source, MeasuredSource):
        return len(source.samples("train"))
    return len(source.load("train", None))


def _share(data: Dataset) -> Dataset:
    """At most MAX_EVALUATED images, at random, because files may be sorted, but always the same ones."""
    if len(data) <= MAX_EVALUATED:
        return data
    return data.subset(np.sort(np.random.default_rng(0).permutation(len(data))[:MAX_EVALUATED]))
