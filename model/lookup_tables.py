"""Tables of pointwise functions over codes: what a `Lookup` node computes, and the step it compiles to.

A code `a` of scale `s` stands for `s * a`, so a function of it has at most 256 values. Rounded to the codes
of the quantizer behind it they are a table from codes to codes, the one step that is run and exported:

    table[a - low] = clamp(rint(f(s * a) / s_y), low_y, high_y)

all in float64 (`model.pointwise`). An error is multiplied by the slope `float32(f'(s * a))` on its way back.
Values stay float64 until they are rounded: in float32 many would fall on a tie just because two scales are
equal, and each runtime would round those its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.ops import Lookup
from fedmpq.model.pointwise import Reals, evaluated

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class LookupCodes:
    """`code = table[source - low]`: codes to codes."""

    output: str
    source: str
    op: Lookup
    """The function that the table is of, before it was rounded."""
    low: int
    """The code of the table's first entry."""
    table: NDArray[np.int32]


@dataclass(frozen=True)
class FunctionOfCodes:
    """A function of codes of which nothing is computed before the quantizer behind it is known."""

    source: str
    op: Lookup
    input: CodeFormat

    def rounded(self, output: str, target: CodeFormat) -> LookupCodes:
        """The step from the codes it reads to those of `target`."""
        values, _ = real_tables(self.op, self.input)
        return LookupCodes(output, self.source, self.op, self.input.low, code_table(values, target))


def real_tables(op: Lookup, source: CodeFormat) -> tuple[Reals, Vector]:
    """The function's value and slope for each code that `source` has, the least first."""
    codes = np.arange(source.low, source.high + 1, dtype=np.float64)
    values, slopes = evaluated(op.function, op.parameter, codes * np.float64(source.scale))
    return values, slopes.astype(np.float32)


def code_table(values: Reals, target: CodeFormat) -> NDArray[np.int32]:
    """The codes of `target` for these values."""
    steps: Reals = np.rint(values / np.float64(target.scale))
    return np.minimum(np.maximum(steps, target.low), target.high).astype(np.int32)
