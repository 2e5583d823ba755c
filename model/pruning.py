"""Magnitude planes of codes, and pruning the most significant one when it is nearly empty.

The magnitude of a code is its distance from the middle of the range: `k = c - 2^(b-1)` in the upper half,
`k = 2^(b-1) - 1 - c` in the lower. Its `b - 1` bits are the magnitude planes. (The planes of the codes
themselves are of no use here: in offset binary the top plane is half ones, however small the weights.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.model.grid import check_bits

MIN_PRUNED_BITS = 2


def magnitudes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """`c - 2^(b-1)` where that is not negative, else `2^(b-1) - 1 - c`."""
    check_bits(bits)
    middle = 1 << (bits - 1)
    wide = codes.astype(np.int16)
    return np.where(wide >= middle, wide - middle, middle - 1 - wide).astype(np.uint8)


def msb_density(codes: NDArray[np.uint8], bits: int) -> float:
    """The share of codes with the top magnitude bit set, that is, whose two top bits are equal."""
    if bits < MIN_PRUNED_BITS:
        raise ValueError(f"a {bits}-bit code has no magnitude plane; the least is {MIN_PRUNED_BITS} bits")
    if codes.size == 0:
        return 0.0
    return int(kernels.magnitude_counts(codes.reshape(-1), bits)[-1]) / codes.size


def prune_msb(codes: NDArray[np.uint8], bits: int, density: float) -> tuple[NDArray[np.uint8], int]:
    """Drop top planes while more than two bits are left and their density is at most `density`.

    `c <- clip(c - 2^(b-2), 0, 2^(b-1) - 1)`, `b <- b - 1`, the step is kept: below 8 bits every value that
    still fits stays what it was, and the few that do not saturate. From 8 bits, whose grid has a zero, to 7,
    whose grid has none, every value moves up by half a step.
    """
    while bits > MIN_PRUNED_BITS and msb_density(codes, bits) <= density:
        shifted = codes.astype(np.int16) - (1 << (bits - 2))
        codes = np.clip(shifted, 0, (1 << (bits - 1)) - 1).astype(np.uint8)
        bits -= 1
    return codes, bits
