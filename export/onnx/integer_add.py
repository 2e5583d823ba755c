"""When a runtime's integer addition is the program's, for every pair of codes.

The program's residual addition is `clamp(rint((a * s_a + b * s_b) / s_y))` in float32, operation by
operation. ONNX Runtime's QLinearAdd computes, with `r = s / s_y` and bytes `A = a + z_a`, `B = b + z_b`,

    x86:  rint((z_y - (r_a * z_a + r_b * z_b)) + r_a * A + r_b * B) in float32, fused or not as the CPU has it
    ARM:  z_y + round((a * m_a + b * m_b) / 2^shift), m = rint(2^shift * r), the greater of 22 bits

and other versions may add in another order. All agree with the program where no sum lies so near to a tie
that the errors of these decide. There are at most 256 x 256 pairs of codes, so all of them are tried; ratios
a few units in the last place away from `s / s_y` move the sums a little where the first ones will not do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal

Ratios = tuple[np.float32, np.float32]
Reals = NDArray[np.float64]

TRIES = 100
MOST_UNITS = 64
_ULP = 2.0**-24
_ARM_BITS = 21
# Products of rounding errors, which the bound below leaves out.
_SLACK = 1.001


@dataclass(frozen=True)
class Operand:
    """Codes, and what is added to make bytes of them.

    If not `clamped`, bytes beyond the codes come too, and mean the nearest code.
    """

    form: CodeFormat
    zero: int
    clamped: bool = True

    @property
    def codes(self) -> NDArray[np.float32]:
        low, high = (self.form.low, self.form.high) if self.clamped else (-self.zero, 255 - self.zero)
        return np.arange(low, high + 1, dtype=np.float32)

    @property
    def meant(self) -> NDArray[np.float32]:
        return np.clip(self.codes, self.form.low, self.form.high)


@dataclass(frozen=True)
class _Pairs:
    """All pairs of codes, and the program's sums of them; the zero points are of both and of the sum."""

    a: Reals
    b: Reals
    wanted: Reals
    low: int
    high: int
    zeros: tuple[int, int, int]

    def agree(self, ratios: NDArray[np.float32]) -> bool:
        """Whether each sum, give or take the worst error, rounds and clamps to what is wanted."""
        left, right = ratios.astype(np.float64)
        sums = self.a * left + self.b * right
        error = self._error(left, right, sums)
        return all(
            np.array_equal(np.clip(np.rint(end), self.low, self.high), self.wanted)
            for end in (sums - error, sums + error)
        )

    def _error(self, left: np.float64, right: np.float64, sums: Reals) -> Reals:
        """The greatest of either way of adding: each operation errs by half a unit of its own result."""
        zero_a, zero_b, zero_sum = self.zeros
        parts = zero_a * left, zero_b * right
        constant = abs(zero_sum - sum(parts))
        products = (self.a + zero_a) * left, (self.b + zero_b) * right
        partial = constant + np.maximum(*products)
        floating = 2 * sum(parts) + constant + products[0] + products[1] + partial + np.abs(sums + zero_sum)
        shift = _ARM_BITS - np.floor(np.log2(max(left, right)))
        whole = 2.0 ** -(shift + 1) * (np.abs(self.a) + np.abs(self.b) + 1)
        greatest: Reals = np.maximum(_SLACK * _ULP * floating, whole)
        return greatest


def exact_ratios(
    add: AddCodes, rounding: QuantizeReal, left: Operand, right: Operand, zero_sum: int
) -> Ratios | None:
    """Ratios with which `rint(a * r_a + b * r_b)`, however computed, is the program's sum; None if none."""
    real = left.meant[:, None] * add.left_scale + right.meant[None, :] * add.right_scale
    wanted = np.clip(np.rint(real / rounding.scale), rounding.low, rounding.high)
    pairs = _Pairs(
        left.codes.astype(np.float64)[:, None],
        right.codes.astype(np.float64)[None, :],
        wanted.astype(np.float64),
        rounding.low,
        rounding.high,
        (left.zero, right.zero, zero_sum),
    )
    first = np.array([add.left_scale / rounding.scale, add.right_scale / rounding.scale], np.float32)
    random = np.random.default_rng(0)
    for attempt in range(TRIES):
        reach = min(MOST_UNITS, attempt)
        units = random.integers(-reach, reach + 1, 2)
        ratios = (first.view(np.int32) + units.astype(np.int32)).view(np.float32)
        if pairs.agree(ratios):
            return np.float32(ratios[0]), np.float32(ratios[1])
    return None
