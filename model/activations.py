"""Activation codes: what a `Quantize` node and an average pool put out.

A `Quantize` node has one learnt clip `alpha` (PACT; a side tensor). Unsigned, it gives codes `0..2^bits - 1`
with scale `alpha / (2^bits - 1)`; signed, codes `-(2^(bits-1) - 1)..2^(bits-1) - 1` with scale
`alpha / (2^(bits-1) - 1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Below this a clip would make scales that float32 products cannot carry; training and evaluation stop there.
MIN_CLIP = np.float32(2.0**-10)
POOLED_BITS = 8


def code_bounds(bits: int, signed: bool) -> tuple[int, int]:
    """The least and the greatest activation code."""
    if not signed:
        return 0, 2**bits - 1
    if bits < 2:
        raise ValueError(f"signed activations need at least 2 bits, not {bits}")
    return -(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1


def effective_clip(clip: np.float32, maximum: float) -> np.float32:
    """The learnt clip, kept positive and, after a ReLU6, at most 6 (`maximum`; 0 means unbounded)."""
    bounded = max(np.float32(clip), MIN_CLIP)
    return min(bounded, np.float32(maximum)) if maximum > 0 else bounded


@dataclass(frozen=True)
class CodeFormat:
    """What the codes of a tensor mean: real value = `scale * code`, codes within `low..high`."""

    scale: np.float32
    low: int
    high: int

    @classmethod
    def quantized(cls, clip: np.float32, maximum: float, bits: int, signed: bool) -> CodeFormat:
        """The format that a `Quantize` node with this clip gives."""
        low, high = code_bounds(bits, signed)
        return cls(np.float32(effective_clip(clip, maximum) / np.float32(high)), low, high)

    @classmethod
    def image(cls, scale: float, zero_point: int) -> CodeFormat:
        """Pixels with the zero point already taken off."""
        return cls(np.float32(scale), -zero_point, 255 - zero_point)

    @property
    def bound(self) -> int:
        """The greatest magnitude a code can have."""
        return max(-self.low, self.high)

    def averaged(self) -> CodeFormat:
        """The format of an average of such codes: the same range in 8-bit steps.

        An average of 4-bit codes carries more than 4 bits; as 8-bit codes of the same clip (`15 * 17 = 255`)
        it needs no clip of its own: `scale' = scale * high / high'`.
        """
        low, high = code_bounds(POOLED_BITS, self.low < 0)
        return CodeFormat(np.float32(self.scale * np.float32(self.high) / np.float32(high)), low, high)

    @classmethod
    def joined(cls, formats: Sequence[CodeFormat]) -> CodeFormat:
        """The format in which a concatenation holds codes of all these: the widest range, in 8-bit steps.

        Nothing is clipped, so it needs no clip of its own. It has a sign if one of them has.
        """
        low, high = code_bounds(POOLED_BITS, any(form.low < 0 for form in formats))
        widest = max(np.float32(form.scale * np.float32(form.high)) for form in formats)
        return cls(np.float32(widest / np.float32(high)), low, high)

    def joining(self, target: CodeFormat) -> np.float32:
        """`scale / scale'` in float32: it makes a code of the format `target` of one of this."""
        return np.float32(self.scale / target.scale)

    def averaging(self, window: NDArray[np.int64]) -> NDArray[np.float32]:
        """`scale / (scale' * window)` in float32: it makes an `averaged` code of a sum of `window` codes."""
        return np.asarray(self.scale / (self.averaged().scale * window.astype(np.float32)), np.float32)
