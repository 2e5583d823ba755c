"""What a data source is: something that knows its splits and loads each as a data set.

The built-in ones (`npz`, `idx`, `image_folders`, `in_memory`, `named`) are sources like the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from fedmpq.data.dataset import DataError, Dataset, Size, height_width, resized
from fedmpq.data.fitting import Form, fitted
from fedmpq.data.samples import Samples
from fedmpq.data.tasks import Task, for_task
from fedmpq.data.value_range import ValueRange

Split = Literal["train", "test"]


@runtime_checkable
class DataSource(Protocol):
    """Labelled images to train on, and perhaps others to test with.

    Where a path to data is accepted, `package.module:Class` names a source of one's own: a class or function
    that is called without arguments and gives a DataSource, or such an object itself. One that gives (image,
    label) by index, as torch's data sets do, serves as well: it has training images alone.
    """

    def splits(self) -> Sequence[Split]:
        """The splits there are, "train" before "test"."""
        ...

    def load(self, split: Split, size: Size | None) -> Dataset:
        """The images of one split, the same at every call.

        `size` is the side, or (height, width), that is wanted. A source that can use it to read less does so;
        images that come in another size are resized by area.
        """
        ...


@runtime_checkable
class FormSource(DataSource, Protocol):
    """A source that makes its samples as a model takes them, such as one of photos of any size."""

    def load_as(self, split: Split, form: Form) -> Dataset:
        """The samples of one split, of the form's height, width and channels."""
        ...

    def count(self, split: Split) -> int:
        """How many samples there are at most, known without reading them."""
        ...


@runtime_checkable
class MeasuredSource(DataSource, Protocol):
    """A source of measured values, which become codes by a range that the whole run has in common."""

    def samples(self, split: Split, form: Form | None = None) -> Samples:
        """The samples of one split as they were measured, where they are cut to the form's length."""
        ...

    def bounds(self, split: Split) -> ValueRange | None:
        """The least and greatest values of each channel; None of samples that are 8-bit codes already."""
        ...


def load_samples(
    source: DataSource,
    name: str,
    split: Split,
    size: Size | None = None,
    task: Task = "classification",
) -> Samples:
    """One split of a source as it was measured, with what the task needs; of one that gives codes, these at
    `size`."""
    _check_split(source, name, split)
    if isinstance(source, MeasuredSource):
        found = source.samples(split)
    else:
        found = _as_samples(source, name, split, size)
    try:
        return for_task(found, task)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _as_samples(source: DataSource, name: str, split: Split, size: Size | None) -> Samples:
    data = load_split(source, name, split, size)
    return Samples(name, data.images, data.labels, data.class_names, data.skipped, data.targets)


def load_form(source: DataSource, name: str, split: Split, form: Form) -> Dataset:
    """One split of a source as a model takes it; an error calls the source by `name`."""
    _check_split(source, name, split)
    if isinstance(source, FormSource):
        data = source.load_as(split, form)
    elif isinstance(source, MeasuredSource):
        data = source.samples(split, form).coded(form.value_range)
    else:
        data = source.load(split, form.size)
    try:
        return for_task(fitted(data, form), form.task)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def load_split(source: DataSource, name: str, split: Split, size: Size | None = None) -> Dataset:
    """One split of a source at `size`; an error calls the source by `name`."""
    _check_split(source, name, split)
    wanted = None if size is None else height_width(size)
    return resized(source.load(split, wanted), wanted)


def _check_split(source: DataSource, name: str, split: Split) -> None:
    if split not in (found := source.splits()):
        raise DataError(f"{name}: no {split} split here, only {', '.join(found)}: {_HINTS[split]}")


_HINTS: dict[Split, str] = {
    "train": "training images are needed",
    "test": "add one, or set some training images aside",
}
