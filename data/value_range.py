"""The range of measured values that 8-bit codes stand for: one for a whole run, never one for each board.

A value x of channel c gets the code

    a = clip(rint((x - low_c) * 255 / (high_c - low_c)), 0, 255),

computed in float32, and a code stands for low_c + a * (high_c - low_c) / 255. Values outside the range get
the nearest code. Pixels as floats have the range 0..1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Images

GREATEST = 1e30
"""No bound may lie further from 0: its difference to another is then a float32."""
MAX_CHANNELS = 4096
_CODES = 255.0
BOARDS = "boards"
"""In the place of a range: the one that all boards agree on."""


@dataclass(frozen=True)
class ValueRange:
    """`low` and `high`, one pair for all channels or one for each; every number is a float32."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.low) == len(self.high) <= MAX_CHANNELS:
            raise DataError(
                f"a range has as many low ends as high ends, 1..{MAX_CHANNELS}, not {len(self.low)} and "
                f"{len(self.high)}"
            )
        ends = zip(self.low, self.high, strict=True)
        rounded = [(_float32(low), _float32(high)) for low, high in ends]
        object.__setattr__(self, "low", tuple(low for low, _ in rounded))
        object.__setattr__(self, "high", tuple(high for _, high in rounded))
        for low, high in rounded:
            if not low < high:
                raise DataError(
                    f"a range of {low:g}..{high:g} is none: it must rise, within -{GREATEST:g}..{GREATEST:g}"
                )

    @property
    def channels(self) -> int:
        """How many have a range of their own; 1: all have the same."""
        return len(self.low)

    def codes(self, values: NDArray[Any]) -> Images:
        """The codes of values (..., channels), piece by piece: floats take four times as much memory."""
        if self.channels not in (1, values.shape[-1]):
            raise DataError(
                f"the samples have {values.shape[-1]} channels, the range of values has {self.channels}: "
                "give one pair for all channels or one for each"
            )
        low = np.array(self.low, np.float32)
        gain = (_CODES / (np.array(self.high) - np.array(self.low))).astype(np.float32)
        out = np.empty(values.shape, np.uint8)
        for piece, coded in zip(values, out, strict=True):
            scaled = (piece.astype(np.float32) - low) * gain
            coded[...] = np.clip(np.rint(scaled), 0, _CODES)
        return out

    def __str__(self) -> str:
        """As `parse_range` reads it, to the bit."""
        return ",".join(f"{low!r}..{high!r}" for low, high in zip(self.low, self.high, strict=True))


def parse_range(text: str) -> ValueRange:
    """From "LOW..HIGH", or several of these with commas, one for each channel."""
    try:
        ends = [[float(end) for end in pair.split("..")] for pair in text.split(",")]
        low, high = ([pair[end] for pair in ends] for end in (0, 1))
    except (ValueError, IndexError):
        ends, low, high = [], [], []
    if not ends or any(len(pair) != 2 for pair in ends):
        raise DataError(
            f"{text!r} is no range of values: give LOW..HIGH, such as -2..2, or one for each channel with "
            "commas"
        )
    return ValueRange(tuple(low), tuple(high))


def agreed_range(reported: Sequence[ValueRange]) -> ValueRange:
    """The range that boards agree on: for each channel the medians of their low ends and of their high ends.

    So fewer than half of them cannot move it beyond what the others say. Where a median low end is not below
    its high end, as of a channel that is constant on most boards, the range is widened to 1 around them.
    """
    if not reported:
        raise DataError("no board has reported the range of its values: at least one is needed")
    counts = {one.channels for one in reported}
    if len(counts) > 1:
        usual = max(sorted(counts), key=lambda count: sum(one.channels == count for one in reported))
        reported = [one for one in reported if one.channels == usual]
    low = np.median(np.array([one.low for one in reported], np.float64), axis=0)
    high = np.median(np.array([one.high for one in reported], np.float64), axis=0)
    return spanning(low, high)


def spanning(low: NDArray[Any], high: NDArray[Any]) -> ValueRange:
    """The range of these ends, made as wide as float32 needs to tell them apart."""
    ends = [_apart(float(np.float32(a)), float(np.float32(b))) for a, b in zip(low, high, strict=True)]
    return ValueRange(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _apart(low: float, high: float) -> tuple[float, float]:
    if high - low > abs(low + high) * 1e-6 and high > low:
        return low, high
    middle = (low + high) / 2
    reach = max(0.5, abs(middle) * 1e-3)
    return max(-GREATEST, middle - reach), min(GREATEST, middle + reach)


def _float32(value: float) -> float:
    """The nearest single; NaN for what lies beyond the ends that a range may have."""
    return float(np.float32(value)) if abs(value) <= GREATEST else math.nan


PIXELS = ValueRange((0.0,), (1.0,))
