"""Labelled images on the board: folders, idx files or an .npz in, one uint8 array out.

NumPy, and Pillow only where images are decoded or resized.

What `load` recognises at PATH (a leading "." hides a file or folder):

| layout | splits |
|---|---|
| `PATH/train/<class>/*.jpg`, `PATH/test/<class>/*.jpg` (or `val`) | train, test |
| Tiny-ImageNet: `train/<class>/images/*`, `val/images/*` with `val/val_annotations.txt` | train, test |
| `PATH/<class>/*.jpg` | train |
| `PATH/train-images-idx3-ubyte[.gz]` and its MNIST siblings, also below `PATH/raw` | train, test |
| `PATH.npz` (or the only .npz in PATH) with `x_train`, `y_train`, `x_test`, `y_test` | train, test |
| the same with `images`, `labels` | train |

Labels number the class folders in sorted order. A class folder may be empty: it keeps its label, so that
boards which each hold a few classes still agree on the numbering. Both splits share one class list, one
image size and one colour mode.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

Split = Literal["train", "test"]
Size = int | tuple[int, int]
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Sources = dict[Split, Callable[["Size | None"], "Dataset"]]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
MAX_CLASSES = 65536
MAX_SIDE = 4096
FLAT_SCALE = 1.0 / 64.0

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
_IDX_PREFIXES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("t10k", "test")}
_ANNOTATIONS = "val_annotations.txt"
_DECODE_CHUNK = 16


class DataError(ValueError):
    """A data set that cannot be used; the message names the path, the limit and the fix."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """N labelled images: `images` uint8 (N, H, W, C), `labels` int64 (N,) indexing `class_names`.

    `skipped` lists (path, reason) of the images that could not be read.
    """

    images: Images
    labels: Labels
    class_names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise DataError(f"images are {_describe(self.images)}, must be uint8 of shape (N, H, W, C)")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels are {_describe(self.labels)}, must be int64, one for each of {len(self)} images"
            )
        if len(self) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise DataError(
                f"labels span {self.labels.min()}..{self.labels.max()}, must lie in "
                f"0..{len(self.class_names) - 1} for {len(self.class_names)} classes: renumber them"
            )

    def __len__(self) -> int:
        return int(self.images.shape[0])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        _, height, width, channels = self.images.shape
        return height, width, channels

    def subset(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Dataset:
        """The images and labels at `indices`, in that order; classes and `skipped` stay."""
        chosen = np.asarray(indices)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise DataError(f"subset takes integer indices, not {chosen.dtype}: use np.flatnonzero on a mask")
        chosen = chosen.astype(np.int64)
        return Dataset(self.images[chosen], self.labels[chosen], self.class_names, self.skipped)

    def normalisation(self) -> tuple[float, int]:
        """One (scale, zero_point) for the whole set: a pixel `a` has the value scale * (a - zero_point).

        zero_point = clip(rint(mean of all pixels), 0, 255); scale = float32(1 / std of all pixels).
        A set of one colour has std 0 and gets scale 1/64.
        """
        if not self.images.size:
            raise DataError("an empty data set has no mean pixel: load at least one image")
        counts = _pixel_counts(self.images).astype(np.float64)
        values = np.arange(256, dtype=np.float64)
        mean = float(counts @ values / counts.sum())
        std = float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))
        scale = 1.0 / std if np.count_nonzero(counts) > 1 else FLAT_SCALE
        return float(np.float32(scale)), int(np.clip(np.rint(mean), 0, 255))


def load(path: str | os.PathLike[str], split: Split, size: Size | None = None) -> Dataset:
    """The images of one split at `path`, resized to `size` (side, or (height, width)) if given.

    Without `size`, folder images that differ in size from the first one are skipped, as are unreadable ones.
    """
    sources = _sources(Path(path))
    if split not in sources:
        raise DataError(f"{path}: no {split} split here, only {', '.join(sources)}: {_missing_hint(split)}")
    return sources[split](None if size is None else _height_width(size))


def splits(path: str | os.PathLike[str]) -> tuple[Split, ...]:
    """The splits that `load` finds at `path`."""
    return tuple(_sources(Path(path)))


def resize(images: Images, size: Size) -> Images:
    """(N, H, W, C) -> (N, h, w, C) by area.

    Half the size is the exact mean of 2x2 pixels, (a + b + c + d + 2) >> 2; any other is Pillow's BOX filter.
    """
    height, width = _height_width(size)
    count, old_height, old_width, channels = images.shape
    if (old_height, old_width) == (height, width):
        return images
    if (old_height, old_width) == (2 * height, 2 * width):
        rows = images[:, ::2].astype(np.uint16) + images[:, 1::2]
        return ((rows[:, :, ::2] + rows[:, :, 1::2] + 2) >> 2).astype(np.uint8)
    image_module = _pillow()
    out = np.empty((count, height, width, channels), np.uint8)
    for index, channel in np.ndindex(count, channels):
        plane = image_module.fromarray(np.ascontiguousarray(images[index, :, :, channel]))
        out[index, :, :, channel] = np.asarray(plane.resize((width, height), image_module.Resampling.BOX))
    return out


def _height_width(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise DataError(f"size {height}x{width} is out of range: each side must lie in 1..{MAX_SIDE}")
    return height, width


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _pixel_counts(images: Images) -> NDArray[np.int64]:
    """How often each value 0..255 occurs; in pieces, because bincount widens what it is given to int64."""
    counts = np.zeros(256, np.int64)
    step = max(1, (1 << 20) // max(1, images[0].size))
    for start in range(0, len(images), step):
        counts += np.bincount(images[start : start + step].reshape(-1), minlength=256)
    return counts


def _missing_hint(split: Split) -> str:
    return "add one, or set some training images aside" if split == "test" else "training images are needed"


def _sources(path: Path) -> Sources:
    """A loader for each split found at `path`."""
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder: give a folder of class folders, idx files or an .npz"
        )
    if path.is_file():
        return _npz_sources(path)
    archives = sorted(path.glob("*.npz"))
    found = _idx_sources(path) or _idx_sources(path / "raw") or _folder_sources(path)
    if not found and len(archives) == 1:
        found = _npz_sources(archives[0])
    if not found:
        raise DataError(
            f"{path}: no data set in this folder: expected train/<class>/*.jpg with test/ or val/ beside it, "
            "<class>/*.jpg, MNIST idx files or one .npz"
        )
    return found


def _checked(
    path: Path,
    images: Images,
    labels: Labels,
    names: tuple[str, ...],
    skipped: tuple[tuple[str, str], ...] = (),
) -> Dataset:
    if not len(images):
        raise DataError(f"{path}: holds no images: at least one is needed")
    try:
        return Dataset(images, labels, names, skipped)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


# Arrays: .npz


def _npz_sources(path: Path) -> Sources:
    arrays = _npz_labels(path)
    names = arrays.pop("class_names", None)
    class_names = (
        _numbered(path, list(arrays.values()))
        if names is None
        else tuple(str(name) for name in names.ravel())
    )
    keys: dict[Split, tuple[str, str]] = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
    if "labels" in arrays:
        keys = {"train": ("images", "labels")}
    return {
        split: partial(_load_npz, path, image_key, _label_vector(path, arrays[label_key]), class_names)
        for split, (image_key, label_key) in keys.items()
        if label_key in arrays
    }


def _npz_labels(path: Path) -> dict[str, NDArray[Any]]:
    """The label arrays whose image arrays are there too, and `class_names` if given."""
    needs = {"labels": "images", "y_train": "x_train", "y_test": "x_test", "class_names": "class_names"}
    found = {key: _npz_array(path, key) for key, images in needs.items() if {key, images} <= _npz_keys(path)}
    if not found.keys() - {"class_names"}:
        raise DataError(
            f"{path}: no images+labels and no x_train+y_train inside: save it with np.savez and these names"
        )
    return found


def _npz_keys(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz ({error}): save it with np.savez") from None


def _npz_array(path: Path, key: str) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            array: NDArray[Any] = archive[key]
            return array
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot read array {key} ({error}): save it again with np.savez") from None


def _load_npz(
    path: Path, key: str, labels: Labels, class_names: tuple[str, ...], size: Size | None
) -> Dataset:
    images = _pixels(path, key, _npz_array(path, key))
    return _checked(path, images if size is None else resize(images, size), labels, class_names)


def _pixels(path: Path, key: str, array: NDArray[Any]) -> Images:
    """uint8 as it is, floats in 0..1 as rint(255 * x); (N, H, W) gains a channel axis."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] > 16 or not all(array.shape[1:]):
        raise DataError(
            f"{path}: array {key} has shape {array.shape}, must be (N, H, W) or (N, H, W, 1..16): "
            "transpose (N, C, H, W) by (0, 2, 3, 1)"
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind != "f":
        raise DataError(f"{path}: array {key} is {array.dtype}, must be uint8 or float in 0..1: convert it")
    if not np.isfinite(array).all():
        raise DataError(f"{path}: array {key} holds NaN or infinity, must lie in 0..1: drop these images")
    if array.size and not 0.0 <= float(array.min()) <= float(array.max()) <= 1.0:
        raise DataError(
            f"{path}: array {key} spans {array.min()}..{array.max()}, floats must lie in 0..1: rescale it"
        )
    scaled: NDArray[np.float32] = array.astype(np.float32) * np.float32(255)
    return np.rint(scaled).astype(np.uint8)


def _label_vector(path: Path, array: NDArray[Any]) -> Labels:
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size != array.shape[0]:
        raise DataError(
            f"{path}: labels are {_describe(array)}, must be integers of shape (N,): convert them"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < MAX_CLASSES:
        raise DataError(
            f"{path}: labels span {array.min()}..{array.max()}, must lie in 0..{MAX_CLASSES - 1}: "
            "renumber them"
        )
    return array.reshape(-1).astype(np.int64)


def _numbered(path: Path, arrays: Iterable[NDArray[Any]]) -> tuple[str, ...]:
    """Classes without names: "0", "1", ... up to the highest label of any split."""
    highest = max((int(_label_vector(path, array).max(initial=0)) for array in arrays), default=0)
    return tuple(str(label) for label in range(highest + 1))


# MNIST's idx files


def _idx_sources(folder: Path) -> Sources:
    files = {
        split: (_idx_file(folder, split, "images", 3), _idx_file(folder, split, "labels", 1))
        for split in _IDX_PREFIXES
    }
    pairs = {split: (images, labels) for split, (images, labels) in files.items() if images and labels}
    if not pairs and any(images or labels for images, labels in files.values()):
        raise DataError(f"{folder}: idx files come in pairs: put images-idx3-ubyte beside labels-idx1-ubyte")
    labels_of = {split: _label_vector(labels, _read_idx(labels, 1)) for split, (_, labels) in pairs.items()}
    names = _numbered(folder, labels_of.values())
    return {
        split: partial(_load_idx, images, labels_of[split], names) for split, (images, _) in pairs.items()
    }


def _idx_file(folder: Path, split: Split, kind: str, dimensions: int) -> Path | None:
    candidates = (
        folder / f"{prefix}-{kind}{separator}idx{dimensions}-ubyte{suffix}"
        for prefix in _IDX_PREFIXES[split]
        for separator in "-."
        for suffix in ("", ".gz")
    )
    return next((path for path in candidates if path.is_file()), None)


def _read_idx(path: Path, dimensions: int) -> Images:
    """idx: bytes 0, 0, type (8 = uint8), rank; `rank` big-endian uint32 sizes; the values in C order."""
    opener: Callable[[Path, Literal["rb"]], Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dimensions)):
                raise DataError(
                    f"{path}: not an idx{dimensions} file of bytes (magic {magic.hex()}): download it again"
                )
            shape = tuple(int(n) for n in np.frombuffer(file.read(4 * dimensions), ">u4"))
            size = int(np.prod(shape, dtype=object))
            payload = file.read(size + 1)
    except DataError:
        raise
    except (OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error) as error:
        raise DataError(f"{path}: unreadable ({error}): download it again") from None
    if len(shape) != dimensions or len(payload) != size:
        raise DataError(
            f"{path}: the header says shape {shape}, but {size} bytes are not what follows: download it again"
        )
    array: Images = np.frombuffer(payload, np.uint8).reshape(shape).copy()
    return array


def _load_idx(path: Path, labels: Labels, class_names: tuple[str, ...], size: Size | None) -> Dataset:
    images = _pixels(path, "images", _read_idx(path, 3))
    return _checked(path, images if size is None else resize(images, size), labels, class_names)


# Folders of image files


class _Listing(NamedTuple):
    """The image files of one split with their classes, in sorted order; an image without a class has None."""

    folder: Path
    paths: tuple[str, ...]
    classes: tuple[str | None, ...]


def _folder_sources(root: Path) -> Sources:
    folders = {
        split: next((root / name for name in names if _is_labelled(root / name)), None)
        for split, names in _SPLIT_FOLDERS.items()
    }
    found = {split: folder for split, folder in folders.items() if folder}
    if not found and _is_labelled(root):
        found = {"train": root}
    return {split: partial(_load_folder, found, split) for split in found}


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
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
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
    images, reasons = _decode_all(listing, mode, shape, None if size is None else _height_width(size))
    skipped = tuple((path, reason) for path, reason in zip(listing.paths, reasons, strict=True) if reason)
    if 2 * len(skipped) > len(labels):
        raise DataError(
            f"{listing.folder}: {len(skipped)} of {len(labels)} images are unusable, at most half may be; "
            f"the first, {skipped[0][0]}: {skipped[0][1]}"
        )
    if skipped:
        kept = np.array([reason is None for reason in reasons])
        images, labels = images[kept], labels[kept]
    return _checked(listing.folder, images, labels, class_names, skipped)


def _folder_labels(listing: _Listing, lead: _Listing, class_names: tuple[str, ...]) -> Labels:
    """The place of each image's class in `class_names`; -1 for an image without a class."""
    label_of = {name: label for label, name in enumerate(class_names)}
    unknown = sorted({name for name in listing.classes if name is not None} - label_of.keys())
    if unknown:
        raise DataError(
            f"{listing.folder}: class {unknown[0]} has no folder in {lead.folder}: add one, even if empty"
        )
    return np.array([-1 if name is None else label_of[name] for name in listing.classes], np.int64)


def _pillow() -> Any:
    """The module PIL.Image: imported late, because arrays and idx files do not need it."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Pillow decodes and resizes images, and is not installed: pip install pillow"
        ) from None
    return Image


def _open(path: str) -> Image.Image:
    """The header of an image. Only SUFFIXES' formats: Pillow would hand an EPS to an interpreter."""
    image: Image.Image = _pillow().open(path, formats=_FORMATS)
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

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        chunks = list(pool.map(decode_chunk, range(0, len(listing.paths), _DECODE_CHUNK)))
    return images, [reason for chunk in chunks for reason in chunk]


def _check_memory(folder: Path, shape: tuple[int, ...]) -> None:
    need, have = int(np.prod(shape, dtype=object)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise DataError(
            f"{folder}: {shape[0]} images of {shape[1]}x{shape[2]} need {need >> 20} MiB, this machine has "
            f"{have >> 20}: give a smaller size"
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
