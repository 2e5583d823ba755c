"""Folders of WAV files as log-mel features: NumPy and the standard library, the same on a board and a server.

A recording becomes a picture of F frames (height) and M mel bands (width) with one channel:

1. Its channels are averaged and scaled to -1..1. It is cut, or filled with silence, to (F - 1) 20 ms + 30 ms.
2. Every 20 ms a frame of 30 ms, times a Hann window w, gives the power |FFT|^2 / (sum w)^2, at the rate of
   the recording.
3. M triangular bands, evenly spaced on the mel scale 2595 log10(1 + f / 700) from 20 Hz to 7600 Hz, sum it.
4. Decibels 10 log10(max(power, 1e-8)), from -80 to 0, become the codes rint((dB + 80) * 255 / 80).

Everything is computed in float64. The model's size says F and M; without one they are 49 and 40, a second.
"""

from __future__ import annotations

import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.class_folders import ClassFolders
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Images, Size, checked, height_width
from fedmpq.data.fitting import Form
from fedmpq.data.skipping import check_skipped

FRAMES, BANDS = 49, 40
FRAME_SECONDS, HOP_SECONDS = 0.030, 0.020
LOWEST, HIGHEST = 20.0, 7600.0
FLOOR = -80.0
RATES = 4000, 384_000
_CODES = 255.0

Floats = NDArray[np.float64]


def describe_features() -> dict[str, Any]:
    """What an exported model's card says of its input."""
    return {
        "kind": "log-mel",
        "frame_seconds": FRAME_SECONDS,
        "hop_seconds": HOP_SECONDS,
        "window": "hann",
        "lowest_hertz": LOWEST,
        "highest_hertz": HIGHEST,
        "mel": "2595 log10(1 + f / 700)",
        "decibels": [FLOOR, 0.0],
        "code": "rint((10 log10(max(power, 1e-8)) + 80) * 255 / 80), height = frames, width = mel bands",
    }


def is_sound(name: str) -> bool:
    return name.lower().endswith((".wav", ".wave"))


class SoundFolders:
    """The splits of class folders of WAV files; `splits` is empty where there are none."""

    def __init__(self, root: Path) -> None:
        self._folders = ClassFolders(root, is_sound)

    def splits(self) -> tuple[Split, ...]:
        return self._folders.splits() if self._folders.has_files() else ()

    def load(self, split: Split, size: Size | None) -> Dataset:
        """Log-mel features of `size` (frames, bands)."""
        return self._load(split, *((FRAMES, BANDS) if size is None else height_width(size)))

    def load_as(self, split: Split, form: Form) -> Dataset:
        if form.channels != 1:
            raise DataError(
                f"log-mel features have 1 channel, the model takes {form.channels}: take a model of one"
            )
        return self._load(split, form.height, form.width)

    def count(self, split: Split) -> int:
        return len(self._folders.listing(split).paths)

    def _load(self, split: Split, frames: int, bands: int) -> Dataset:
        listing, labels, class_names = self._folders.labelled(split)
        images = np.zeros((len(listing.paths), frames, bands, 1), np.uint8)
        reasons = [
            _fill(path, images[index, :, :, 0]) if listing.classes[index] is not None else "not listed"
            for index, path in enumerate(listing.paths)
        ]
        skipped = check_skipped(listing.folder, listing.paths, reasons, "recordings")
        if skipped:
            kept = np.array([reason is None for reason in reasons])
            images, labels = images[kept], labels[kept]
        return checked(listing.folder, images, labels, class_names, skipped)


def _fill(path: str, out: Images) -> str | None:
    """The features of a file into `out` (frames, bands); the reason if that is impossible."""
    try:
        out[...] = log_mel(*read_wave(path), *out.shape)
    except Exception as error:  # a broken file must not stop a board
        return " ".join(str(error).split()) or type(error).__name__
    return None


def read_wave(path: str) -> tuple[Floats, int]:
    """The recording as one channel in -1..1, and its rate in hertz."""
    with wave.open(path, "rb") as file:
        rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
        # More than the longest picture takes is never looked at; a header may lie about its length.
        data = file.readframes(file.getnframes())
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"its rate of {rate} Hz is outside {RATES[0]}..{RATES[1]}")
    data = data[: len(data) // (width * channels) * width * channels]
    values = _integers(data, width).astype(np.float64) / float(1 << (8 * width - 1))
    return values.reshape(-1, channels).mean(axis=1), rate


def _integers(data: bytes, width: int) -> NDArray[Any]:
    """Signed samples of 1 to 4 bytes; those of one byte are stored with 128 added."""
    if width == 1:
        return np.frombuffer(data, np.uint8).astype(np.int16) - 128
    if width == 3:
        bytes_of = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = bytes_of[:, 0] | bytes_of[:, 1] << 8 | bytes_of[:, 2] << 16
        return whole - ((whole & 0x800000) << 1)
    if width not in (2, 4):
        raise ValueError(f"its samples are {width} bytes long, must be 1 to 4")
    return np.frombuffer(data, f"<i{width}")


def log_mel(sound: Floats, rate: int, frames: int, bands: int) -> Images:
    """The codes (frames, bands) of a recording."""
    length, hop = round(FRAME_SECONDS * rate), round(HOP_SECONDS * rate)
    whole = (frames - 1) * hop + length
    padded = np.zeros(whole)
    padded[: min(whole, len(sound))] = sound[:whole]
    starts = hop * np.arange(frames)[:, None] + np.arange(length)
    hann, filters = _hann(length), _filters(rate, length, bands)
    power = np.abs(np.fft.rfft(padded[starts] * hann, n=_fft_size(length), axis=1)) ** 2 / hann.sum() ** 2
    decibels = 10.0 * np.log10(np.maximum(power @ filters.T, 10.0 ** (FLOOR / 10.0)))
    codes: Images = np.clip(np.rint((decibels - FLOOR) * (_CODES / -FLOOR)), 0, _CODES).astype(np.uint8)
    return codes


def _fft_size(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _hann(length: int) -> Floats:
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(length) / length)


@lru_cache(8)
def _filters(rate: int, length: int, bands: int) -> Floats:
    """(bands, frequencies): triangles of height 1 between neighbouring points of the mel scale."""
    hertz = np.arange(_fft_size(length) // 2 + 1) * (rate / _fft_size(length))
    least, most = 2595.0 * np.log10(1.0 + np.array([LOWEST, HIGHEST]) / 700.0)
    points = 700.0 * (10.0 ** (np.linspace(least, most, bands + 2) / 2595.0) - 1.0)
    low, middle, high = points[:-2, None], points[1:-1, None], points[2:, None]
    rise, fall = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    triangles: Floats = np.maximum(0.0, np.minimum(rise, fall))
    return triangles
