"""Small made-up files of images, and what a loader says of those it cannot use."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedmpq.data.dataset import DataError
from fedmpq.data.open_source import load

RNG = np.random.default_rng(7)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, shape, np.uint8)


def save_image(path: Path, array: NDArray[np.uint8], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + array.tobytes())


def refused(path: Path, *words: str, split: Any = "train", size: Any = None) -> None:
    """Loading fails with one line that names the path and all the words."""
    with pytest.raises(DataError) as caught:
        load(path, split, size)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message
