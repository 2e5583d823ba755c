"""The first convolution over groups of four neighbouring pixels.

Runtimes' fast integer convolutions want input channels in fours; an image has three, or one. In memory, four
neighbouring pixels of `C` channels are one pixel of `4*C` channels, and a convolution of stride `s` puts out
`4/s` pixels for them. As a convolution of such groups it reads `taps` instead of the kernel's columns: output
`j` of a group has column `k` of the kernel at pixel `s*j + k - padding` from the group's first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import Conv2d
from fedmpq.model.grid import FAST_BITS

PIXELS = 4


@dataclass(frozen=True)
class PixelGroups:
    """`taps[j, g, q]`: the kernel's column, or one past the last for none, at pixel `q` of group `g`."""

    taps: NDArray[np.int64]
    before: int
    """Groups read besides the outputs' own, on its left and, `after`, on its right."""
    after: int

    @property
    def outputs(self) -> int:
        """Pixels put out for a group."""
        return len(self.taps)


def pixel_groups(op: Conv2d, width: int, bits: int) -> PixelGroups | None:
    """How to convolve groups of pixels of an image so wide; None where it cannot be done or gains nothing."""
    columns, stride, padding = op.kernel[1], op.stride[1], op.padding[1]
    whole = width % PIXELS == 0 and PIXELS % stride == 0
    same = width + 2 * padding - columns in range(width - stride, width)
    plain = op.groups == 1 and op.dilation[1] == 1 and op.in_channels % PIXELS
    if not (whole and same and plain and bits <= FAST_BITS):
        return None
    outputs = PIXELS // stride
    first, last = -padding, stride * (outputs - 1) - padding + columns - 1
    before, after = -(first // PIXELS), last // PIXELS
    pixels = np.arange(-before * PIXELS, (after + 1) * PIXELS)
    taps = pixels[None, :] + padding - stride * np.arange(outputs)[:, None]
    taps = np.where((taps >= 0) & (taps < columns), taps, columns)
    return PixelGroups(taps.reshape(outputs, -1, PIXELS), before, after)
