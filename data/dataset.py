"""Labelled images in memory: one uint8 array and its labels, and how they are resized.

NumPy, and Pillow only where images are resized by other than one half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = int | tuple[int, int]
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Targets = NDArray[np.float32]

MAX_CLASSES = 65536
MAX_SIDE = 4096
FLAT_SCALE = 1.0 / 64.0


class DataError(ValueError):
    """A data set that cannot be used; the message names the path, the limit and the fix."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """N labelled images: `images` uint8 (N, H, W, C), `labels` int64 (N,) indexing `class_names`.

    `skipped` lists (path, reason) of the images that could not be read. Of a task whose answers are numbers,
    `targets` float32 (N, K) has them, and `class_names` names the K of them; labels are then all 0, unless
    they say of which kind a sample is. Targets (N, 0) are those of samples of which nothing is known.
    """

    images: Images
    labels: Labels
    class_names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    targets: Targets | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise DataError(f"images are {describe(self.images)}, must be uint8 of shape (N, H, W, C)")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels are {describe(self.labels)}, must be int64, one for each of {len(self)} images"
            )
        if len(self) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise DataError(
                f"labels span {self.labels.min()}..{self.labels.max()}, must lie in "
                f"0..{len(self.class_names) - 1} for {len(self.class_names)} classes: renumber them"
            )
        if self.targets is not None:
            check_targets(self.targets, len(self), len(self.class_names))

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
        targets = None if self.targets is None else self.targets[chosen]
        return dataclasses.replace(
            self, images=self.images[chosen], labels=self.labels[chosen], targets=targets
        )

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


def resize(images: Images, size: Size) -> Images:
    """(N, H, W, C) -> (N, h, w, C) by area.

    Half the size is the exact mean of 2x2 pixels, (a + b + c + d + 2) >> 2; any other is Pillow's BOX filter,
    along rows first and then along columns. Of the two in one call Pillow 13 chooses the order by itself,
    earlier ones do not, and after rounding the order shows.
    """
    height, width = height_width(size)
    count, old_height, old_width, channels = images.shape
    if (old_height, old_width) == (height, width):
        return images
    if (old_height, old_width) == (2 * height, 2 * width):
        rows = images[:, ::2].astype(np.uint16) + images[:, 1::2]
        return ((rows[:, :, ::2] + rows[:, :, 1::2] + 2) >> 2).astype(np.uint8)
    image_module = pillow()
    box = image_module.Resampling.BOX
    out = np.empty((count, height, width, channels), np.uint8)
    for index, channel in np.ndindex(count, channels):
        plane = image_module.fromarray(np.ascontiguousarray(images[index, :, :, channel]))
        narrowed = plane.resize((width, old_height), box)
        out[index, :, :, channel] = np.asarray(narrowed.resize((width, height), box))
    return out


def resized(data: Dataset, size: Size | None) -> Dataset:
    """The data set with its images at `size`; as it is where that is None or its own size."""
    images = data.images if size is None else resize(data.images, size)
    return data if images is data.images else dataclasses.replace(data, images=images)


def height_width(size: Size) -> tuple[int, int]:
    """(height, width) of a size; one number is the side of a square."""
    height, width = (size, size) if isinstance(size, int) else size
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise DataError(f"size {height}x{width} is out of range: each side must lie in 1..{MAX_SIDE}")
    return height, width


def check_targets(targets: NDArray[Any], samples: int, names: int) -> None:
    """Refuse targets that are not float32 (samples, names) and finite; (samples, 0) are none at all."""
    if targets.dtype != np.float32 or targets.shape not in ((samples, names), (samples, 0)):
        raise DataError(
            f"targets are {describe(targets)}, must be float32 of shape ({samples}, {names}): a row for each "
            "sample, a column for each of the names"
        )
    if not np.isfinite(targets).all():
        raise DataError("targets hold NaN or infinity: drop these samples")


def describe(array: NDArray[Any]) -> str:
    """Type and shape of an array, for error messages."""
    return f"{array.dtype} of shape {array.shape}"


def _pixel_counts(images: Images) -> NDArray[np.int64]:
    """How often each value 0..255 occurs; in pieces, because bincount widens what it is given to int64."""
    counts = np.zeros(256, np.int64)
    step = max(1, (1 << 20) // max(1, images[0].size))
    for start in range(0, len(images), step):
        counts += np.bincount(images[start : start + step].reshape(-1), minlength=256)
    return counts


def checked(
    path: Path,
    images: Images,
    labels: Labels,
    names: tuple[str, ...],
    skipped: tuple[tuple[str, str], ...] = (),
) -> Dataset:
    """The data set of what was read at `path`; errors name it."""
    if not len(images):
        raise DataError(f"{path}: holds no images: at least one is needed")
    try:
        return Dataset(images, labels, names, skipped)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def pillow() -> Any:
    """The module PIL.Image: imported late, because arrays and idx files at their own size do not need it."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Pillow decodes and resizes images, and is not installed: pip install pillow"
        ) from None
    return Image
