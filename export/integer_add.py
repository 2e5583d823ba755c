"""When a runtime's integer addition is the program's, for every pair of codes.

The program's residual addition is `clamp(rint((a * s_a + b * s_b) / s_y))` in float32, operation by
operation. ONNX Runtime's QLinearAdd computes `rint(a * r_a + b * r_b + constant)`, in an order, and with or
without fused operations, as the CPU has it. The two agree where no sum lies so near to a tie that the order
decides. There are at most 256 x 256 pairs of codes, so all of them are tried; ratios a few units in the last
place away from `s / s_y` move the sums a little where the first ones will not do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal

Ratios = tuple[np.float32, np.float32]

TRIES = 200
MOST_UNITS = 256
# Roundings of QLinearAdd in the worst order: of each product, of the constant's terms and of the sums.
_ROUNDINGS = 4
_ULP = 2.0**-24


def exact_ratios(
    add: AddCodes, rounding: QuantizeReal, left: CodeFormat, right: CodeFormat, offset: int
) -> Ratios | None:
    """Ratios with which `rint(a * r_a + b * r_b)`, in any order, is the program's sum; None if none is found.

    `offset` is the greatest zero point there is; it adds to what the roundings are of.
    """
    a = np.arange(left.low, left.high + 1, dtype=np.float32)[:, None]
    b = np.arange(right.low, right.high + 1, dtype=np.float32)[None, :]
    real = a * add.left_scale + b * add.right_scale
    wanted = np.clip(np.rint(real / rounding.scale), rounding.low, rounding.high)
    first = np.array([add.left_scale / rounding.scale, add.right_scale / rounding.scale], np.float32)
    random = np.random.default_rng(0)
    for attempt in range(TRIES):
        reach = min(MOST_UNITS, 4 * attempt)
        units = random.integers(-reach, reach + 1, 2)
        ratios = (first.view(np.int32) + units.astype(np.int32)).view(np.float32)
        if _agrees(a, b, ratios, wanted, (rounding.low, rounding.high), offset):
            return np.float32(ratios[0]), np.float32(ratios[1])
    return None


def _agrees(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    ratios: NDArray[np.float32],
    wanted: NDArray[np.float32],
    bounds: tuple[int, int],
    offset: int,
) -> bool:
    """Whether each sum, give or take the worst roundings, rounds and clamps to what is wanted."""
    left, right = ratios.astype(np.float64)
    sums = a * left + b * right
    size = 2 * ((np.abs(a).max() + offset) * left + (np.abs(b).max() + offset) * right) + offset
    error = _ROUNDINGS * _ULP * size
    lowest = np.clip(np.rint(sums - error), *bounds)
    highest = np.clip(np.rint(sums + error), *bounds)
    return bool(np.array_equal(lowest, wanted) and np.array_equal(highest, wanted))
