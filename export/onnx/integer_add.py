"""When a runtime's integer addition is the program's, for every pair of codes.

The program's residual addition is `clamp(rint((a * s_a + b * s_b) / s_y))` in float32, operation by
operation. ONNX Runtime's QLinearAdd computes, with `r = s / s_y`, bytes `A = a + z_a`, `B = b + z_b` and
`F = z_y - (r_a * z_a + r_b * z_b)`, each operation rounded to float32,

    x86 with FMA:  rint(A * r_a + (B * r_b + F)), each product and sum rounded once; F fused or not
    other x86:     rint((F + A * r_a) + B * r_b)
    ARM:           z_y + round((a * m_a + b * m_b) / 2^shift), m = rint(2^shift * r), the greater of 22 bits
    anything else: rint((r_a * a + r_b * b) + z_y)

There are at most 256 x 256 pairs of codes, so all of them are tried, in each of these ways. Of 8-bit sums
some pairs lie so near to a tie that these errors decide; ratios a few units in the last place away from
`s / s_y` move them. Of the ratios that do, those are taken that keep every sum furthest from the wrong side,
so that a way of adding that is not known here has the least to spoil.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal

Ratios = tuple[np.float32, np.float32]
Reals = NDArray[np.float64]
Singles = NDArray[np.float32]

CANDIDATES = 4000
MOST_UNITS = 24
MOST_TRIED = 100
"""Of the candidates on the right side of every tie, so many are tried in every way of adding."""
# Outside, ARM adds otherwise and float64 does not hold every product exactly.
LEAST_RATIO, LEAST_GREATER_RATIO, GREATEST_RATIO = 2.0**-14, 2.0**-10, 2.0**8
_ARM_BITS = 21
# How far, relative to the bytes' products, a candidate and the rounding of any way of adding move a sum.
_REACH = (MOST_UNITS + 16) * 2.0**-23


@dataclass(frozen=True)
class Operand:
    """Codes, and what is added to make bytes of them.

    If not `clamped`, bytes beyond the codes come too, and mean the nearest code.
    """

    form: CodeFormat
    zero: int
    clamped: bool = True

    @property
    def codes(self) -> Singles:
        low, high = (self.form.low, self.form.high) if self.clamped else (-self.zero, 255 - self.zero)
        return np.arange(low, high + 1, dtype=np.float32)

    @property
    def meant(self) -> Singles:
        return np.clip(self.codes, self.form.low, self.form.high)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of codes, and the program's sums of them; the zero points are of both and of the sum."""

    a: Reals
    b: Reals
    wanted: Reals
    low: int
    high: int
    zeros: tuple[int, int, int]

    def slack(self, ratios: Singles) -> Reals:
        """How far `a * r_a + b * r_b` is from rounding to anything but what is wanted; below 0 it does."""
        sums = self.a * float(ratios[0]) + self.b * float(ratios[1])
        above = np.where(self.wanted == self.low, np.inf, sums - (self.wanted - 0.5))
        below = np.where(self.wanted == self.high, np.inf, (self.wanted + 0.5) - sums)
        nearest: Reals = np.minimum(above, below)
        return nearest

    def reach(self, ratios: Singles) -> Reals:
        """How far the sums of a candidate near `ratios` can be from those of `ratios`, errors included."""
        zero_a, zero_b, zero_sum = self.zeros
        bytes_a, bytes_b = self.a + 2 * zero_a, self.b + 2 * zero_b
        far: Reals = _REACH * (bytes_a * float(ratios[0]) + bytes_b * float(ratios[1]) + zero_sum + 1)
        return far

    def some(self, which: NDArray[np.bool_]) -> _Pairs:
        return _Pairs(self.a[which], self.b[which], self.wanted[which], self.low, self.high, self.zeros)

    def agree(self, ratios: Singles) -> bool:
        """Whether every way of adding gives what is wanted."""
        return all(
            np.array_equal(np.clip(sums, self.low, self.high), self.wanted) for sums in self._ways(ratios)
        )

    def _ways(self, ratios: Singles) -> Iterator[Reals]:
        zero_a, zero_b, zero_sum = self.zeros
        left, right = ratios
        bytes_a, bytes_b = (self.a + zero_a).astype(np.float32), (self.b + zero_b).astype(np.float32)
        for parts in _sums_of_products(left, np.float32(zero_a), right, np.float32(zero_b)):
            fixed = np.float32(zero_sum) - parts
            inner = _fused(bytes_b, right, fixed)
            yield np.rint(_fused(bytes_a, left, inner)).astype(np.float64) - zero_sum
            plain = (fixed + bytes_a * left) + bytes_b * right
            yield np.rint(plain).astype(np.float64) - zero_sum
        yield _on_arm(self.a, self.b, ratios)
        portable = (self.a.astype(np.float32) * left + self.b.astype(np.float32) * right) + np.float32(
            zero_sum
        )
        yield np.rint(portable).astype(np.float64) - zero_sum


def _fused(factor: Singles, ratio: np.float32, addend: Singles | np.float32) -> Singles:
    """`factor * ratio + addend` rounded once: float64 holds byte times ratio plus float32 exactly."""
    return np.asarray(factor.astype(np.float64) * float(ratio) + addend, np.float32)


def _sums_of_products(a: np.float32, b: np.float32, c: np.float32, d: np.float32) -> Iterator[np.float32]:
    """`a * b + c * d`, neither product fused into the sum, or either."""
    yield np.float32(np.float32(a * b) + np.float32(c * d))
    yield np.float32(float(a) * float(b) + float(np.float32(c * d)))
    yield np.float32(float(np.float32(a * b)) + float(c) * float(d))


def _on_arm(a: Reals, b: Reals, ratios: Singles) -> Reals:
    shift = _ARM_BITS - int(np.floor(np.log2(float(ratios.max()))))
    factors = np.rint(np.ldexp(ratios.astype(np.float64), shift))
    sums = np.ldexp(a * factors[0] + b * factors[1], -shift)
    away_from_zero: Reals = np.sign(sums) * np.floor(np.abs(sums) + 0.5)
    return away_from_zero


def exact_ratios(
    add: AddCodes, rounding: QuantizeReal, left: Operand, right: Operand, zero_sum: int
) -> Ratios | None:
    """Ratios with which QLinearAdd, on whatever CPU, is the program's sum; None if none are found."""
    first = np.array([add.left_scale / rounding.scale, add.right_scale / rounding.scale], np.float32)
    if first.min() < LEAST_RATIO or not LEAST_GREATER_RATIO <= first.max() < GREATEST_RATIO / 2:
        return None
    pairs = _pairs(add, rounding, left, right, zero_sum)
    slack, reach = pairs.slack(first), pairs.reach(first)
    if (slack < -reach).any():
        return None
    near = pairs.some(slack < 2 * reach)
    units = np.random.default_rng(0).integers(-MOST_UNITS, MOST_UNITS + 1, (CANDIDATES, 2))
    units[0] = 0
    candidates = (first.view(np.int32) + units.astype(np.int32)).view(np.float32)
    margins = np.array([near.slack(each).min(initial=np.inf) for each in candidates])
    for place in np.argsort(-margins, kind="stable")[:MOST_TRIED]:
        if margins[place] > 0 and near.agree(candidates[place]) and pairs.agree(candidates[place]):
            return np.float32(candidates[place][0]), np.float32(candidates[place][1])
    return None


def _pairs(add: AddCodes, rounding: QuantizeReal, left: Operand, right: Operand, zero_sum: int) -> _Pairs:
    real = left.meant[:, None] * add.left_scale + right.meant[None, :] * add.right_scale
    wanted = np.clip(np.rint(real / rounding.scale), rounding.low, rounding.high).astype(np.float64)
    a, b = np.broadcast_arrays(
        left.codes.astype(np.float64)[:, None], right.codes.astype(np.float64)[None, :]
    )
    zeros = left.zero, right.zero, zero_sum
    return _Pairs(a.ravel(), b.ravel(), wanted.ravel(), rounding.low, rounding.high, zeros)
