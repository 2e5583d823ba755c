"""A data source by what a user writes: a path, or `package.module:Class` for one of the user's own.

What is recognised at PATH:

| layout | splits |
|---|---|
| `PATH/train/<class>/*.jpg`, `PATH/test/<class>/*.jpg` (or `val`) | train, test |
| Tiny-ImageNet: `train/<class>/images/*`, `val/images/*` with `val/val_annotations.txt` | train, test |
| `PATH/<class>/*.jpg` | train |
| `PATH/train-images-idx3-ubyte[.gz]` and its MNIST siblings, also below `PATH/raw` | train, test |
| `PATH.npz` (or the only .npz in PATH) with `x_train`, `y_train`, `x_test`, `y_test` | train, test |
| the same with `images`, `labels`, or `samples`, `labels` (and `samples_test`, `labels_test`) | train, test |
| `PATH/<class>/*.wav`, also below train and test | train, test |
| `PATH.csv` or `.parquet`, `PATH/*.csv`, `PATH/<class>/*.csv`; options behind a question mark | train, test |
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from fedmpq.data.data_source import DataSource, Split, load_split
from fedmpq.data.dataset import DataError, Dataset, Size
from fedmpq.data.idx import IdxSource
from fedmpq.data.image_folders import ImageFolders
from fedmpq.data.in_memory import Indexed, InMemory, PairsSource
from fedmpq.data.npz import NpzSource
from fedmpq.data.options import no_options, split_options, table_options
from fedmpq.data.sound import SoundFolders
from fedmpq.data.tables import TableSource, is_table
from fedmpq.system.named_object import NamedObjectError, make_object, require_members

T = TypeVar("T")
Spec = str | os.PathLike[str]

_OBJECT = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def load(spec: Spec, split: Split, size: Size | None = None) -> Dataset:
    """The images of one split of a source, resized to `size` (side, or (height, width)) if given."""
    return load_split(open_source(spec), os.fspath(spec), split, size)


def splits(spec: Spec) -> tuple[Split, ...]:
    """The splits that `load` finds."""
    return tuple(open_source(spec).splits())


def open_source(spec: Spec) -> DataSource:
    """The source at a path, or the user's own by `package.module:Class`; a path that exists comes first."""
    return load_own(os.fspath(spec)) if names_object(spec) else open_path(os.fspath(spec))


def names_object(spec: Spec) -> bool:
    """Whether a text is a `package.module:Class`, and no path that exists."""
    return isinstance(spec, str) and bool(_OBJECT.fullmatch(spec)) and not Path(spec).exists()


def open_path(spec: str) -> DataSource:
    """The source that this file or folder is; a table may have options behind a question mark."""
    name, options = split_options(spec)
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder: give a folder of class folders, idx files, an .npz or a table"
        )
    if is_table(path.name) or options:
        tables = TableSource(path, table_options(path, options))
        if not tables.splits():
            no_options(path, options)
        return tables
    if path.is_file():
        return NpzSource(path)
    candidates: tuple[Callable[[], DataSource], ...] = (
        lambda: IdxSource(path),
        lambda: IdxSource(path / "raw"),
        lambda: SoundFolders(path),
        lambda: TableSource(path),
        lambda: ImageFolders(path),
    )
    for candidate in candidates:
        if (source := candidate()).splits():
            return source
    if len(archives := sorted(path.glob("*.npz"))) == 1:
        return NpzSource(archives[0])
    raise DataError(
        f"{path}: no data set in this folder: expected train/<class>/*.jpg with test/ or val/ beside it, "
        "<class>/*.jpg, <class>/*.wav, *.csv, MNIST idx files or one .npz"
    )


def load_own(spec: str) -> DataSource:
    """The user's own source by `package.module:Class`, or samples with labels that a function gives.

    This imports and runs the user's code: `spec` must come from who runs this program, never from a server.
    """

    def made() -> object:
        try:
            return make_object(spec, "data source")
        except NamedObjectError as error:
            raise DataError(str(error)) from error

    found = made()
    if isinstance(found, Dataset):
        return OwnSource(InMemory(found), repr(spec))
    if isinstance(found, Indexed | Iterable) and not isinstance(found, DataSource):
        return PairsSource(found, repr(spec), made)
    return OwnSource(found, repr(spec))


class OwnSource:
    """A source of the user's own, whose mistakes are errors that call it by `name`."""

    def __init__(self, source: object, name: str) -> None:
        self._name = f"data source {name}"
        try:
            self._source: Any = require_members(source, DataSource, self._name)
        except NamedObjectError as error:
            raise DataError(str(error)) from error

    def splits(self) -> tuple[Split, ...]:
        given = self._asked("splits()", self._source.splits)
        if not isinstance(given, Sequence) or not given or not set(given) <= set(get_args(Split)):
            raise DataError(f"{self._name}: splits() gives {given!r}: give ('train',) or ('train', 'test')")
        return tuple(given)

    def load(self, split: Split, size: Size | None) -> Dataset:
        call = f"load({split!r}, {size!r})"
        data = self._asked(call, lambda: self._source.load(split, size))
        if not isinstance(data, Dataset) or not len(data):
            what = "no images" if isinstance(data, Dataset) else f"a {type(data).__name__}"
            raise DataError(
                f"{self._name}: {call} gives {what}: give a {Dataset.__module__}.Dataset "
                "with at least one image"
            )
        return data

    def _asked(self, call: str, work: Callable[[], T]) -> T:
        try:
            return work()
        # Whatever the user's code raises: the cause is chained, the message says whose code it was.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._name}: {call} failed: {reason}") from error
