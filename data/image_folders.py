"""Folders of image files: a folder for each class, or Tiny-ImageNet's list; with Pillow.

Labels number the class folders in sorted order. A class folder may be empty: it keeps its label, so that
clients which each hold a few classes still agree on the numbering. Both splits share one class list, one
image size and one colour mode. A leading "." hides a file or folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedmpq.data.data_source import Split
from fedmpq.data.dataset import (
    DataError,
    Dataset,
    Images,
    Labels,
    Size,
    checked,
    height_width,
    pillow,
    resize,
)
from fedmpq.system.machine import available_cores
from fedmpq.system.memory import memory_given, size_text

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
_ANNOTATIONS = "val_annotations.txt"
_DECODE_CHUNK = 16
_MOST_DECODERS = 8


class ImageFolders:
    """The splits of a folder of labelled images; `splits` is empty where there are none."""

    def __init__(self, root: Path) -> None:
        folders = {
            split: next((root / name for name in names if _is_labelled(root / name)), None)
            for split, names in _SPLIT_FOLDERS.items()
        }
        self._folders: dict[Split, Path] = {split: folder for split, folder in folders.items() if folder}
        if not self._folders and _is_labelled(root):
            self._folders = {"train": root}

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._folders)

    def load(self, split: Split, size: Size | None) -> Dataset:
        """Images that cannot be read are skipped; without `size`, so are those unlike the first in size."""
        return _load_folder(self._folders, split, size)


class _Listing(NamedTuple):
    """The image files of one split with their classes, in sorted order; an image without a class has None."""

    folder: Path
    paths: tuple[str, ...]
    classes: tuple[str | None, ...]


def _is_labelled(folder: Path) -> bool:
    """Holds class folders or Tiny-ImageNet's list; its test/images and a bare train/*.jpg are neither."""
    not_classes = {"images", *(name for names in _SPLIT_FOLDERS.values() for name in names)}
    return (folder / _ANNOTATIONS).is_file() or not set(_visible(folder, "folder")) <= not_classes


def _visible(folder: Path, kind: Literal["folder", "image"]) -> list[str]:
    """Sorted names of the sub-folders or image files; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            if kind == "folder":
                return sorted(entry.name for entry in shown if entry.is_dir())
            return sorted(
                entry.name for entry in shown if entry.name.lower().endswith(SUFFIXES) and entry.is_file()
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}): make it readable") from None


def _list_images(folder: Path) -> _Listing:
    if (folder / _ANNOTATIONS).is_file():
        classes = _annotations(folder / _ANNOTATIONS)
        names = _visible(folder / "images", "image")
        return _Listing(
            folder, tuple(str(folder / "images" / name) for name in names), tuple(map(classes.get, names))
        )
    pairs = [
        (str(folder / label / inner / name), label)
        for label in _visible(folder, "folder")
        for inner in (".", "images")
        for name in _visible(folder / label / inner, "image")
    ]
    return _Listing(folder, tuple(path for path, _ in pairs), tuple(label for _, label in pairs))


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


def _class_names(listing: _Listing) -> tuple[str, ...]:
    """Sorted class folders, empty ones too; for a list, the classes it mentions."""
    if (listing.folder / _ANNOTATIONS).is_file():
        return tuple(sorted({name for name in listing.classes if name is not None}))
    return tuple(_visible(listing.folder, "folder"))


def _load_folder(found: dict[Split, Path], split: Split, size: Size | None) -> Dataset:
    listings = {name: _list_images(folder) for name, folder in found.items()}
    listing, lead = listings[split], listings.get("train", listings[split])
    if not listing.paths:
        raise DataError(f"{listing.folder}: no images in its class folders: add some ({', '.join(SUFFIXES)})")
    class_names = _class_names(lead)
    labels = _folder_labels(listing, lead, class_names)
    # The training split stands first in `listings`, so both splits agree on the mode and size.
    mode, shape = _reference(path for each in listings.values() for path in each.paths)
    images, reasons = _decode_all(listing, mode, shape, None if size is None else height_width(size))
    skipped = tuple((path, reason) for path, reason in zip(listing.paths, reasons, strict=True) if reason)
    if 2 * len(skipped) > len(labels):
        raise DataError(
            f"{listing.folder}: {len(skipped)} of {len(labels)} images are unusable, at most half may be; "
            f"the first, {skipped[0][0]}: {skipped[0][1]}"
        )
    if skipped:
        kept = np.array([reason is None for reason in reasons])
        images, labels = images[kept], labels[kept]
    return checked(listing.folder, images, labels, class_names, skipped)


def _folder_labels(listing: _Listing, lead: _Listing, class_names: tuple[str, ...]) -> Labels:
    """The place of each image's class in `class_names`; -1 for an image without a class."""
    label_of = {name: label for label, name in enumerate(class_names)}
    unknown = sorted({name for name in listing.classes if name is not None} - label_of.keys())
    if unknown:
        raise DataError(
            f"{listing.folder}: class {unknown[0]} has no folder in {lead.folder}: add one, even if empty"
        )
    return np.array([-1 if name is None else label_of[name] for name in listing.classes], np.int64)


def _open(path: str) -> Image.Image:
    """The header of an image. Only SUFFIXES' formats: Pillow would hand an EPS to an interpreter."""
    image: Image.Image = pillow().open(path, formats=_FORMATS)
    if image.mode in _DEEP:
        image.close()
        raise ValueError(f"more than 8 bits a channel (mode {image.mode}): save it with 8")
    return image


def _reference(paths: Iterable[str]) -> tuple[str, tuple[int, int]]:
    """The mode and (height, width) of all images: the first one's size, and "L" only if every one is grey."""
    shape: tuple[int, int] | None = None
    reason = "none found"
    for path in paths:
        try:
            with _open(path) as image:
                shape = shape or (image.height, image.width)
                if image.mode not in _GREY:
                    return "RGB", shape
        except DataError:
            raise
        except Exception as error:  # as in _decode
            reason = f"{path}: {_reason(error, path)}"
    if shape is None:
        raise DataError(f"no readable image; the last tried, {reason}")
    return "L", shape


def _decode_all(
    listing: _Listing, mode: str, expected: tuple[int, int], size: tuple[int, int] | None
) -> tuple[Images, list[str | None]]:
    """All images as one array, and for each why it could not be read, or None."""
    shape = (len(listing.paths), *(size or expected), 3 if mode == "RGB" else 1)
    _check_memory(listing.folder, shape)
    images = np.zeros(shape, np.uint8)

    def decode_chunk(start: int) -> list[str | None]:
        stop = min(start + _DECODE_CHUNK, len(listing.paths))
        return [
            _decode(listing.paths[i], mode, expected, size, images[i])
            if listing.classes[i] is not None
            else f"not listed in {_ANNOTATIONS}"
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


def _decode(
    path: str, mode: str, expected: tuple[int, int], size: tuple[int, int] | None, out: Images
) -> str | None:
    """Decode one file into `out` (H, W, C); the reason if that is impossible."""
    try:
        with _open(path) as image:
            if size is None and (image.height, image.width) != expected:
                return (
                    f"{image.height}x{image.width}, not {expected[0]}x{expected[1]} as the first: give a size"
                )
            if size is not None:
                # Decode a photo at the least JPEG scale that holds twice the size: a board lacks the memory.
                image.draft(None, (2 * size[1], 2 * size[0]))
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        pixels = pixels.reshape(1, *pixels.shape[:2], out.shape[2])
        out[...] = pixels[0] if size is None else resize(pixels, size)[0]
    except DataError:
        raise
    except Exception as error:  # a broken file makes Pillow raise nearly anything, and must not stop a board
        return _reason(error, path)
    return None


def _reason(error: Exception, path: str) -> str:
    """One line, without the path that stands beside it."""
    text = " ".join(str(error).split()).replace(f" '{path}'", "").replace(f" {path!r}", "")
    return text or type(error).__name__
