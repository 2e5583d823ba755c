"""What a data source is: something that knows its splits and loads each as a data set.

The built-in ones (`npz`, `idx`, `image_folders`, `in_memory`, `named`) are sources like the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from fedmpq.data.dataset import DataError, Dataset, Size, height_width, resized

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


def load_split(source: DataSource, name: str, split: Split, size: Size | None = None) -> Dataset:
    """One split of a source at `size`; an error calls the source by `name`."""
    if split not in (found := source.splits()):
        raise DataError(f"{name}: no {split} split here, only {', '.join(found)}: {_HINTS[split]}")
    wanted = None if size is None else height_width(size)
    return resized(source.load(split, wanted), wanted)


_HINTS: dict[Split, str] = {
    "train": "training images are needed",
    "test": "add one, or set some training images aside",
}
