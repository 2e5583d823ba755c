"""When a runtime's own float function, rounded, is a table of codes for every code.

Runtimes have no fast table over bytes, but they have the functions themselves in float32. One that errs by
little, whatever its instructions and their order, gives the table

    rint((f(s * a) * factor + offset) / s_y)

as long as no code `a` lies so near to a tie that the error decides. There are at most 256 codes, so all are
tried. Where some lie too near, a factor next to 1, and if need be an offset next to 0, moves them away: for
each code the factors that do are an interval, and what is wanted is a point that all of them share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.pointwise import FUNCTIONS, evaluated

Reals = NDArray[np.float64]

# What a runtime's function may be off the truth: at least twice what ONNX Runtime's and XNNPACK's are.
ERROR_OF_BOUNDED = 2.0**-21
ERROR_PER_MAGNITUDE = 2.0**-21
# Of the float32 operations after it, relative to the code.
_ROUNDING = 2.0**-22
_OFFSETS = sorted(np.arange(-64, 65) * 2.0**-12, key=abs)


@dataclass(frozen=True)
class Rounding:
    """`rint((f * factor + offset) / s_y)` is the table; the offset is in units of the output's codes."""

    factor: float
    offset: float
    clamps: bool
    """Whether values lie beyond the output's codes, so that they must be clamped."""


def exact_rounding(
    step: LookupCodes, source: CodeFormat, target: CodeFormat, codes: NDArray[np.int64]
) -> Rounding | None:
    """How to round the function of these codes; one beyond the source's is to be taken as the nearest."""
    x = codes * np.float64(source.scale)
    values, _ = evaluated(step.op.function, step.op.parameter, x)
    steps = values / np.float64(target.scale)
    table = step.table[np.clip(codes - step.low, 0, len(step.table) - 1)]
    bounded = FUNCTIONS[step.op.function].bound > 0
    error = ERROR_OF_BOUNDED if bounded else ERROR_PER_MAGNITUDE * (1.0 + np.abs(x))
    margin = error / np.float64(target.scale) + _ROUNDING * np.abs(steps)
    low = np.where(table == target.low, -np.inf, table - 0.5 + margin)
    high = np.where(table == target.high, np.inf, table + 0.5 - margin)
    for offset in _OFFSETS:
        factor = _common_factor(steps, low - offset, high - offset)
        if factor is not None:
            got = np.rint(steps * factor + offset)
            clamps = bool(got.min() < target.low or got.max() > target.high)
            return Rounding(factor, float(offset), clamps)
    return None


def _common_factor(steps: Reals, low: Reals, high: Reals) -> float | None:
    """The factor nearest to 1 that takes every step to between its low and high, a float32; None if none."""
    if not ((low <= 0) & (high >= 0))[steps == 0].all():
        return None
    moved = steps != 0
    ends = np.sort(np.stack([low[moved] / steps[moved], high[moved] / steps[moved]]), axis=0)
    least, greatest = ends[0].max(initial=0.0), ends[1].min(initial=2.0)
    factor = np.float32(1.0 if least <= 1.0 <= greatest else (least + greatest) / 2)
    return float(factor) if least <= factor <= greatest else None
