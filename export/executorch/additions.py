"""How XNNPACK can compute an addition so that it is the program's, for every pair of codes.

The program's is `clamp(rint((a * s_a + b * s_b) / s_y))` in float32, operation by operation. XNNPACK's is in
integers: with `m = rint(2^shift * s / s_y)` for each operand, and `shift` such that the greater `m` has 21
bits, `code = (a * m_a + b * m_b + 2^(shift - 1)) >> shift`. Where that is not the program's sum for all pairs
of codes, of which there are at most 255 x 255, the addition is in float32. There XNNPACK multiplies by
`fl(1 / s_y)` instead of dividing; a factor `c` of 1, give or take some units in the last place, in
`rint(fl(fl(fl(fl(a * s_a) + fl(b * s_b)) * c) * fl(1 / s_y)))` brings sums next to a tie to the right side.
On some processors the last product goes into its rounding whole, without the outer `fl`: the factor must do
for both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal

IN_INTEGERS = np.float32(0)
"""What stands for no factor at all."""
_MULTIPLIER_BITS = 20
_LEAST_RATIO, _GREATEST_RATIO = 2.0**-10, 2.0**8
_MOST_UNITS = 40


def exact_factor(
    add: AddCodes,
    rounding: QuantizeReal,
    formats: Mapping[str, CodeFormat],
    scales: Mapping[str, np.float32],
) -> np.float32 | None:
    """`IN_INTEGERS`, or the factor with which float32 is exact; None if there is none."""
    left, right = formats[add.left], formats[add.right]
    a = np.arange(left.low, left.high + 1)[:, None]
    b = np.arange(right.low, right.high + 1)[None, :]
    real = a.astype(np.float32) * add.left_scale + b.astype(np.float32) * add.right_scale
    wanted = np.clip(np.rint(real / rounding.scale), rounding.low, rounding.high)

    def exact(sums: NDArray[np.generic]) -> bool:
        return np.array_equal(np.clip(sums, rounding.low, rounding.high), wanted)

    s_a, s_b, s_y = (scales[name] for name in (add.left, add.right, rounding.output))
    sums = integer_sums(a, b, np.array([s_a, s_b], np.float32) / s_y)
    if sums is not None and exact(sums):
        return IN_INTEGERS
    real = a.astype(np.float32) * s_a + b.astype(np.float32) * s_b
    for units in sorted(range(-_MOST_UNITS, _MOST_UNITS + 1), key=abs):
        factor, inverse = np.float32(1 + units * 2.0**-24), np.float32(1) / s_y
        scaled = real * factor
        # The product of two float32 is exact in float64.
        whole = scaled.astype(np.float64) * np.float64(inverse)
        if exact(np.rint(scaled * inverse)) and exact(np.rint(whole)):
            return factor
    return None


def integer_sums(
    a: NDArray[np.int64], b: NDArray[np.int64], ratios: NDArray[np.float32]
) -> NDArray[np.int64] | None:
    """XNNPACK's, before they are clamped, for these `s / s_y`; None where it refuses them."""
    if ratios.min() < _LEAST_RATIO or ratios.max() >= _GREATEST_RATIO:
        return None
    shift = _MULTIPLIER_BITS - int(np.floor(np.log2(ratios.max())))
    factors = np.rint(np.ldexp(ratios.astype(np.float64), shift)).astype(np.int64)
    sums: NDArray[np.int64] = (a * factors[0] + b * factors[1] + (1 << (shift - 1))) >> shift
    return sums
