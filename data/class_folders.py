"""Folders of labelled files: a folder for each class, perhaps below `train` and `test`, or a list.

The list is that of Tiny-ImageNet. Labels number the class folders in sorted order. A class folder may be
empty: it keeps its label, so that clients which each hold a few classes still agree on the numbering. Both
splits share one class list. A leading "." hides a file or folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Labels

ANNOTATIONS = "val_annotations.txt"
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}


class Listing(NamedTuple):
    """The files of one split with their classes, in sorted order; a file without a class has None."""

    folder: Path
    paths: tuple[str, ...]
    classes: tuple[str | None, ...]


class Labelled(NamedTuple):
    """The files of one split with their labels; -1 for a file without a class."""

    listing: Listing
    labels: Labels
    class_names: tuple[str, ...]


class ClassFolders:
    """The splits of a folder of labelled files; `splits` is empty where there are no class folders."""

    def __init__(self, root: Path, is_wanted: Callable[[str], bool]) -> None:
        self._is_wanted = is_wanted
        folders = {
            split: next((root / name for name in names if _is_labelled(root / name)), None)
            for split, names in _SPLIT_FOLDERS.items()
        }
        self._folders: dict[Split, Path] = {split: folder for split, folder in folders.items() if folder}
        if not self._folders and _is_labelled(root):
            self._folders = {"train": root}

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._folders)

    def has_files(self) -> bool:
        """Whether there is a file of that kind in any class folder."""
        return any(self.listing(split).paths for split in self._folders)

    def listing(self, split: Split) -> Listing:
        folder = self._folders[split]
        if (folder / ANNOTATIONS).is_file():
            classes = _annotations(folder / ANNOTATIONS)
            names = self._files(folder / "images")
            return Listing(
                folder, tuple(str(folder / "images" / name) for name in names), tuple(map(classes.get, names))
            )
        pairs = [
            (str(folder / label / inner / name), label)
            for label in _folders(folder)
            for inner in (".", "images")
            for name in self._files(folder / label / inner)
        ]
        return Listing(folder, tuple(path for path, _ in pairs), tuple(label for _, label in pairs))

    def labelled(self, split: Split) -> Labelled:
        """The files of a split under the labels of the training split's classes."""
        listing = self.listing(split)
        lead = self.listing("train") if "train" in self._folders else listing
        class_names = _class_names(lead)
        return Labelled(listing, _labels(listing, lead, class_names), class_names)

    def _files(self, folder: Path) -> list[str]:
        return [entry.name for entry in _visible(folder) if self._is_wanted(entry.name) and entry.is_file()]


def _is_labelled(folder: Path) -> bool:
    """Holds class folders or Tiny-ImageNet's list; its test/images and a bare train/*.jpg are neither."""
    not_classes = {"images", *(name for names in _SPLIT_FOLDERS.values() for name in names)}
    return (folder / ANNOTATIONS).is_file() or not set(_folders(folder)) <= not_classes


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _visible(folder) if entry.is_dir()]


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """Sorted entries of a folder; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}): make it readable") from None
    return sorted(shown, key=lambda entry: entry.name)


def _annotations(path: Path) -> dict[str, str]:
    """Tiny-ImageNet's list: image name, tab, class, and a box that is of no use here."""
    classes: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): make it readable") from None
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("\t")
        if len(fields) < 2:
            raise DataError(f"{path}: line {number} is not 'image<TAB>class': correct it")
        classes[fields[0]] = fields[1]
    return classes


def _class_names(listing: Listing) -> tuple[str, ...]:
    """Sorted class folders, empty ones too; for a list, the classes it mentions."""
    if (listing.folder / ANNOTATIONS).is_file():
        return tuple(sorted({name for name in listing.classes if name is not None}))
    return tuple(_folders(listing.folder))


def _labels(listing: Listing, lead: Listing, class_names: tuple[str, ...]) -> Labels:
    label_of = {name: label for label, name in enumerate(class_names)}
    unknown = sorted({name for name in listing.classes if name is not None} - label_of.keys())
    if unknown:
        raise DataError(
            f"{listing.folder}: class {unknown[0]} has no folder in {lead.folder}: add one, even if empty"
        )
    return np.array([-1 if name is None else label_of[name] for name in listing.classes], np.int64)
