"""One photo as pixels: the one way in which training, `predict` and the server read an image file.

1. The first frame is decoded whole and turned upright as its EXIF orientation says.
2. Its colours become RGB, or grey as L = (19595 R + 38470 G + 7471 B + 32768) >> 16. Transparency is
   dropped, a palette is looked up, and 16 bits a channel become their upper 8.
3. It is resized by area: half the size is the exact mean of 2x2 pixels, any other is Pillow's BOX filter, the
   mean of the pixels whose centres lie in the new one's area, along rows and then along columns.

Pillow's `draft` mode, which decodes a JPEG at a fraction of its size, is not used: no other decoder has it,
and it is up to 12 grey levels away from the mean of the pixels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Images, pillow, resize
from fedmpq.system.memory import memory_given, size_text

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff", ".avif", ".heic",
    ".heif",
)  # fmt: skip
# Only these: Pillow would hand an EPS to an interpreter.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF", "AVIF", "HEIF")
_HEIC = (".heic", ".heif")
_GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N")
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_ORIENTATION, _FIRST_ON_ITS_SIDE = 0x0112, 5
_DECODED = 8
"""Bytes a pixel takes while a photo is decoded: as it is stored, upright and in the model's colours."""


def read_photo(path: str, size: tuple[int, int] | None, channels: int) -> Images:
    """The pixels of a file, uint8 (height, width, channels), at `size` or at its own.

    Raises whatever Pillow raises on a damaged file; `reason_of` puts that in one line.
    """
    if channels not in (1, 3):
        raise DataError(
            f"a photo has 1 channel (grey) or 3 (colour), not {channels}: take a model of 1 or 3 input "
            "channels, or give its samples as an .npz"
        )
    with open_photo(path) as image, _memory(image):
        pixels = _pixels(image, "L" if channels == 1 else "RGB")
    shaped: Images = pixels.reshape(1, *pixels.shape[:2], channels)
    images = shaped if size is None else resize(shaped, size)
    photo: Images = images[0]
    return photo


def open_photo(path: str) -> Image.Image:
    """The header of an image file; its pixels are read later."""
    image: Image.Image = pillow().open(path, formats=_formats(path.lower().endswith(_HEIC)))
    if image.mode == "F":
        image.close()
        raise ValueError(
            "its pixels are floats, whose range nobody knows: save it with 8 or 16 bits a channel"
        )
    return image


def is_grey(image: Image.Image) -> bool:
    """Whether an opened file has no colours."""
    return image.mode in _GREY


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(height, width) of an opened file once it is upright."""
    # Pillow turns a TIFF by itself, the size in its header included.
    turned = image.format != "TIFF" and image.getexif().get(_ORIENTATION, 1) >= _FIRST_ON_ITS_SIDE
    return (image.width, image.height) if turned else (image.height, image.width)


def reason_of(error: Exception, path: str) -> str:
    """Why a file could not be read, in one line and without the path that stands beside it."""
    text = " ".join(str(error).split()).replace(f" '{path}'", "").replace(f" {path!r}", "")
    return text or type(error).__name__


def _pixels(image: Image.Image, mode: str) -> NDArray[np.uint8]:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode in _DEEP:
        upright = pillow().fromarray(_upper_bits(np.asarray(upright)))
    return np.asarray(upright if upright.mode == mode else upright.convert(mode))


def _upper_bits(deep: NDArray[Any]) -> NDArray[np.uint8]:
    """The upper 8 of 16 bits."""
    if deep.size and not 0 <= int(deep.min()) <= int(deep.max()) <= 0xFFFF:
        raise ValueError("it has more than 16 bits a channel: save it with 8 or 16")
    return (deep >> 8).astype(np.uint8)


def _formats(heic: bool) -> tuple[str, ...]:
    """Those that can be read here. HEIC is not Pillow's own: the package pillow-heif adds it."""
    known = _known_formats()
    if heic and "HEIF" not in known:
        raise ValueError(
            "HEIC is not read by Pillow alone: pip install pillow-heif, or have the phone save JPEG"
        )
    return tuple(name for name in _FORMATS if name in known)


@cache
def _known_formats() -> frozenset[str]:
    image_module = pillow()
    image_module.init()
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:
        register_heif_opener()
    return frozenset(image_module.OPEN)


class _Room:
    """Memory that photos which are decoded at the same time share."""

    def __init__(self) -> None:
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taking(self, need: int, most: int) -> Iterator[None]:
        """Waits until `need` more bytes make no more than `most`; one photo alone always goes ahead."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + need <= most)
            self._taken += need
        try:
            yield
        finally:
            with self._changed:
                self._taken -= need
                self._changed.notify_all()


_room = _Room()


@contextmanager
def _memory(image: Image.Image) -> Iterator[None]:
    """Refuses a photo that needs more memory than there is, and lets few large ones be decoded at once."""
    need, given = _DECODED * image.width * image.height, memory_given()
    if need > given:
        raise ValueError(
            f"{image.height}x{image.width} pixels need {size_text(need)} of memory, {size_text(given)} may "
            "be taken: save it smaller"
        )
    with _room.taking(need, given // 4):
        yield


def is_photo(name: str | os.PathLike[str]) -> bool:
    """Whether a file's name ends as an image's does."""
    return os.fspath(name).lower().endswith(SUFFIXES)
