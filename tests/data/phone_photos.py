"""Photos as phones leave them in a folder: of any size, turned, grey, of many formats, one damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.data.files import save_image

CLASSES = ("day", "night")
ENDINGS = ("jpg", "jpg", "JPEG", "png", "webp", "gif", "tiff", "bmp")


def photo(label: int, size: tuple[int, int], random: np.random.Generator) -> NDArray[np.uint8]:
    """A bright or a dark scene: a ramp from left to right, with noise."""
    ramp = np.linspace(0, 60, size[1])[None, :, None] + (150 if label == 0 else 20)
    return np.clip(ramp + random.integers(-20, 20, (*size, 3)), 0, 255).astype(np.uint8)


def phone_folder(folder: Path, count: int, seed: int) -> Path:
    """`count` photos of each class, and a damaged one."""
    random = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        for n in range(count):
            size = (int(random.integers(20, 70)), int(random.integers(20, 70)))
            ending = ENDINGS[n % len(ENDINGS)]
            array = photo(label, size, random)
            if n % 3 == 2:
                array = np.asarray(Image.fromarray(array).convert("L"))
            exif = Image.Exif()
            exif[0x0112] = 1 + int(random.integers(8))
            options = {} if ending in ("gif", "bmp") else {"exif": exif}
            save_image(folder / name / f"IMG_{n:04}.{ending}", array, **options)
    whole = (folder / CLASSES[0] / "IMG_0000.jpg").read_bytes()
    (folder / CLASSES[1] / "IMG_9999.jpg").write_bytes(whole[: len(whole) // 2])
    return folder
