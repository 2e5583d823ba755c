"""Samples as a model takes them: labelled by its classes, with its height, width and channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fedmpq.data.dataset import DataError, Dataset, Images, resized
from fedmpq.data.tasks import Task
from fedmpq.data.value_range import ValueRange

# As Pillow's conversion to "L": ITU-R 601-2 luma in 16-bit fixed point.
_LUMA = np.array([19595, 38470, 7471], np.uint32)


@dataclass(frozen=True)
class Form:
    """Height, width and channels of the samples that a model takes, and the range that codes stand for."""

    height: int
    width: int
    channels: int
    value_range: ValueRange | None = None
    """Of measured values; None: floats lie in 0..1, and others cannot be coded."""
    task: Task = "classification"
    """What the model does with them, which says what must be known of each."""

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


def fitted(data: Dataset, form: Form) -> Dataset:
    """Images in the model's colours and at its size; samples of height 1 are none, and must fit already."""
    if data.image_shape == (form.height, form.width, form.channels):
        return data
    height, _, channels = data.image_shape
    if 1 in (height, form.height) or (channels != form.channels and {channels, form.channels} != {1, 3}):
        raise DataError(
            f"the samples are {data.image_shape} (height, width, channels), the model takes "
            f"{(form.height, form.width, form.channels)}: only images are brought to another size, and only "
            "from grey to colour or back; give samples of that shape"
        )
    images = data.images
    if channels != form.channels:
        images = grey(images) if form.channels == 1 else images.repeat(3, axis=3)
    return resized(dataclasses.replace(data, images=images), form.size)


def grey(images: Images) -> Images:
    """(N, H, W, 3) to (N, H, W, 1): L = (19595 R + 38470 G + 7471 B + 32768) >> 16, as for photos."""
    out = np.empty((*images.shape[:3], 1), np.uint8)
    # One by one: the products are four times as large.
    for image, dark in zip(images, out, strict=True):
        dark[..., 0] = (image @ _LUMA + np.uint32(0x8000)) >> np.uint32(16)
    return out


def labelled(data: Dataset, class_names: Sequence[str]) -> Dataset:
    """The same images under the model's labels, found by the classes' names.

    Labels of files without class names (their classes are called "0", "1", ...) are the model's already.
    A class without images need not be one of the model's.
    """
    label_of = {name: label for label, name in enumerate(class_names)}
    held = [data.class_names[label] for label in np.flatnonzero(np.bincount(data.labels))]
    unknown = [name for name in held if name not in label_of]
    if not unknown:
        table = np.array([label_of.get(name, -1) for name in data.class_names], np.int64)
        return dataclasses.replace(data, labels=table[data.labels], class_names=tuple(class_names))
    if not numbered(data.class_names):
        raise DataError(
            f"class {unknown[0]!r} is none of the model's {len(class_names)} classes "
            f"({few(class_names)}): rename its folder, or leave it out with --skip-class"
        )
    if (greatest := int(data.labels.max())) >= len(class_names):
        raise DataError(
            f"label {greatest} is none of the model's: its {len(class_names)} classes ({few(class_names)}) "
            f"end at {len(class_names) - 1}; number the labels as the model does"
        )
    return dataclasses.replace(data, class_names=tuple(class_names))


def numbered(class_names: Sequence[str]) -> bool:
    """Whether these are the names of classes that have none: "0", "1", ..."""
    return tuple(class_names) == tuple(str(label) for label in range(len(class_names)))


def without_classes(data: Dataset, skipped: Collection[str]) -> Dataset:
    """The data set without the samples of some classes; the classes keep their labels."""
    if skipped and data.targets is not None:
        raise DataError("the samples have targets and no classes: none can be left out with --skip-class")
    if unknown := sorted(set(skipped) - set(data.class_names)):
        raise DataError(
            f"class {unknown[0]!r} is to be left out, and is none of this data's {len(data.class_names)} "
            f"({few(data.class_names)}): check its spelling"
        )
    left_out = np.array([name in skipped for name in data.class_names])
    return data.subset(np.flatnonzero(~left_out[data.labels])) if skipped else data


def few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, ..." if len(names) > 5 else shown
