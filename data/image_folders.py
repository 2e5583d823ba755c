"""Folders of image files, with Pillow.

Both splits share one image size and one colour mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmpq.data.class_folders import ANNOTATIONS, ClassFolders, Listing
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Images, Size, checked, height_width
from fedmpq.data.fitting import Form
from fedmpq.data.photo import SUFFIXES, is_grey, is_photo, open_photo, read_photo, reason_of, upright_size
from fedmpq.data.skipping import check_skipped
from fedmpq.system.machine import available_cores
from fedmpq.system.memory import memory_given, size_text

_DECODE_CHUNK = 16
_MOST_DECODERS = 8


class ImageFolders:
    """The splits of a folder of labelled images; `splits` is empty where there are none."""

    def __init__(self, root: Path) -> None:
        self._folders = ClassFolders(root, is_photo)
        self._known: dict[_Key, Images] = {}
        self._keys: list[_Key] = []

    def splits(self) -> tuple[Split, ...]:
        return self._folders.splits()

    def load(self, split: Split, size: Size | None) -> Dataset:
        """Images that cannot be read are skipped; without `size`, so are those unlike the first in size.

        They are grey if all are, or else in colour.
        """
        return self._load(split, None if size is None else height_width(size), None)

    def load_as(self, split: Split, form: Form) -> Dataset:
        """Every image in the colours and at the size that a model takes.

        Files that have not changed since they were last read so are not decoded again.
        """
        return self._load(split, form.size, form.channels)

    def count(self, split: Split) -> int:
        """How many image files there are, readable or not."""
        return len(self._folders.listing(split).paths)

    def _load(self, split: Split, size: tuple[int, int] | None, channels: int | None) -> Dataset:
        listing, labels, class_names = self._folders.labelled(split)
        if not listing.paths:
            raise DataError(
                f"{listing.folder}: no images in its class folders: add some ({', '.join(SUFFIXES)})"
            )
        expected = None
        if size is None or channels is None:
            # The training split stands first, so both splits agree on the colours and the size.
            listings = [self._folders.listing(each) for each in self.splits()]
            first = _reference(path for each in listings for path in each.paths)
            channels = channels or first.channels
            expected = first.size if size is None else None
        images, reasons = self._decoded(listing, _Wanted(size, expected, channels))
        skipped = check_skipped(listing.folder, listing.paths, reasons, "images")
        if skipped:
            kept = np.array([reason is None for reason in reasons])
            images, labels = images[kept], labels[kept]
        # What was not left out, as it lies in the data set: a copy would take the memory twice.
        good = [path for path, reason in zip(self._keys, reasons, strict=True) if reason is None]
        self._known = dict(zip(good, images, strict=True)) if size is not None else {}
        return checked(listing.folder, images, labels, class_names, skipped)

    def _decoded(self, listing: Listing, wanted: _Wanted) -> tuple[Images, list[str | None]]:
        """All images as one array, and for each why it could not be read, or None."""
        size = wanted.size or wanted.expected
        assert size is not None
        shape = (len(listing.paths), *size, wanted.channels)
        _check_memory(listing.folder, shape)
        if 2 * math.prod(shape) > memory_given():
            # Both the old images and the new do not fit: all are decoded again.
            self._known = {}
        # Before they are read: a file that changes meanwhile is read again the next time.
        self._keys = [_key(path, wanted) for path in listing.paths]
        return _decode_all(
            listing, wanted, np.zeros(shape, np.uint8), [self._known.get(key) for key in self._keys]
        )


class _First(NamedTuple):
    """What decides for all images: (height, width) of the first, and 1 channel only if every one is grey."""

    size: tuple[int, int]
    channels: int


def _reference(paths: Iterable[str]) -> _First:
    size: tuple[int, int] | None = None
    reason = "none found"
    for path in paths:
        try:
            with open_photo(path) as image:
                size = size or upright_size(image)
                if not is_grey(image):
                    return _First(size, 3)
        except DataError:
            raise
        except Exception as error:  # as in _decode
            reason = f"{path}: {reason_of(error, path)}"
    if size is None:
        raise DataError(f"no readable image; the last tried, {reason}")
    return _First(size, 1)


class _Wanted(NamedTuple):
    """What images are resized to, or the size that all of them must have; and their channels."""

    size: tuple[int, int] | None
    expected: tuple[int, int] | None
    channels: int


_Key = tuple[str, int, int, _Wanted]
"""A file, its size and time of change, and what was wanted of it."""


def _decode_all(
    listing: Listing, wanted: _Wanted, images: Images, known: Sequence[Images | None]
) -> tuple[Images, list[str | None]]:
    """`images` with what is known and what files hold, and for each why it could not be read, or None."""

    def decode_chunk(start: int) -> list[str | None]:
        stop = min(start + _DECODE_CHUNK, len(listing.paths))
        return [
            _decode(listing.paths[i], wanted, images[i], known[i])
            if listing.classes[i] is not None
            else f"not listed in {ANNOTATIONS}"
            for i in range(start, stop)
        ]

    with ThreadPoolExecutor(min(_MOST_DECODERS, available_cores())) as pool:
        chunks = list(pool.map(decode_chunk, range(0, len(listing.paths), _DECODE_CHUNK)))
    return images, [reason for chunk in chunks for reason in chunk]


def _check_memory(folder: Path, shape: tuple[int, ...]) -> None:
    need, given = math.prod(shape), memory_given()
    if need > given:
        raise DataError(
            f"{folder}: {shape[0]} images of {shape[1]}x{shape[2]} need {size_text(need)} of memory, "
            f"{size_text(given)} may be taken: give a smaller size, or more memory"
        )


def _key(path: str, wanted: _Wanted) -> _Key:
    try:
        status = Path(path).stat()
    except OSError:
        return path, -1, -1, wanted
    return path, status.st_size, status.st_mtime_ns, wanted


def _decode(path: str, wanted: _Wanted, out: Images, known: Images | None) -> str | None:
    """Decode one file into `out` (H, W, C); the reason if that is impossible."""
    if known is not None:
        out[...] = known
        return None
    try:
        pixels = read_photo(path, wanted.size, wanted.channels)
        if pixels.shape != out.shape:
            height, width = pixels.shape[:2]
            return f"{height}x{width}, not {out.shape[0]}x{out.shape[1]} as the first: give a size"
        out[...] = pixels
    except DataError:
        raise
    except Exception as error:  # a broken file makes Pillow raise nearly anything, and must not stop a board
        return reason_of(error, path)
    return None
