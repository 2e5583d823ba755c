"""Scales for XNNPACK, which keeps one for each tensor and computes from them what the program multiplies by.

A layer's multiplier is `fl(fl(s_in * k) / s_out)` there, with a scale `k` for each channel's weights. An
addition goes by the scales of its operands and of the sum (`export.executorch.additions`).

With the program's own scales both nearly always give the program's codes, and fast. Whether they do is
decided here for all inputs at once: a multiplier is equal or cannot change a code, an addition is tried on
all pairs of codes. Where one does not, all scales are 1 instead: then a layer's `k` is its multiplier to the
bit, and additions are computed in float32 with the program's scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedmpq.export.executorch.additions import exact_factor
from fedmpq.export.operations import Operation, RealLayer, RoundedLayer, RoundedProduct
from fedmpq.export.pooling import is_even
from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import AvgPool
from fedmpq.model.grid import integer_weights
from fedmpq.model.integer_program import AddCodes, Dequantize, IntegerProgram, QuantizeReal, Requantize
from fedmpq.model.shape_steps import ConcatCodes, FlattenCodes, PoolAverage, PoolMax, Rearrange

Vector = NDArray[np.float32]

# Below, XNNPACK loads no layer.
MIN_MULTIPLIER = np.float32(2.0**-32)
UNIT = np.float32(1)
_UNITS_TRIED = (0, 1, -1, 2, -2, 3, -3)


@dataclass(frozen=True)
class Scales:
    """`weights` by the output of their layer or average, `values` by name; a value without one has 1.

    `factors` by sum are what `export.executorch.additions` found.
    """

    weights: dict[str, Vector]
    values: dict[str, np.float32] = field(default_factory=dict)
    factors: dict[str, np.float32] = field(default_factory=dict)

    def of(self, name: str) -> np.float32:
        return self.values.get(name, UNIT)

    @property
    def own(self) -> bool:
        """Whether these are the program's scales, so that dequantized codes are its reals."""
        return bool(self.values)


def choose_scales(program: IntegerProgram, steps: Sequence[Operation]) -> Scales:
    """The program's own scales if XNNPACK's arithmetic is exact with them, else those of 1."""
    return _own_scales(program, steps) or _unit_scales(program, steps)


def _unit_scales(program: IntegerProgram, steps: Sequence[Operation]) -> Scales:
    weights: dict[str, Vector] = {}
    for step in steps:
        if isinstance(step, RoundedLayer):
            # No int32 sum times this rounds to anything but 0, nor does it times less.
            weights[step.output] = np.maximum(step.multiplier, MIN_MULTIPLIER)
        elif isinstance(step, PoolAverage) and is_even(step):
            channels = program.graph.shapes[step.source][0]
            weights[step.output] = np.full(channels, step.multipliers[0, 0], np.float32)
    return Scales(weights)


def _own_scales(program: IntegerProgram, steps: Sequence[Operation]) -> Scales | None:
    sums = {step.output: step for step in steps if isinstance(step, AddCodes)}
    if program.output in sums or any(_multiplies(step) for step in steps):
        return None
    whole = _whole(steps)
    values = {name: UNIT if name in whole else form.scale for name, form in program.formats.items()}
    scales = Scales({}, values)
    for step in steps:
        if isinstance(step, QuantizeReal):
            factor = exact_factor(sums[step.source], step, program.formats, values)
            if factor is None:
                return None
            scales.factors[step.output] = factor
    return scales if _find_weights(program, steps, scales) else None


def _multiplies(step: Operation) -> bool:
    """Whether the program multiplies codes themselves there, and not sums of products of them."""
    if isinstance(step, PoolAverage):
        return not is_even(step)
    return isinstance(step, Requantize | ConcatCodes | Dequantize)


def _find_weights(program: IntegerProgram, steps: Sequence[Operation], scales: Scales) -> bool:
    """Adds the weight scales of every layer and average; false if one has none that is exact."""
    for step in steps:
        found: Vector | None
        if isinstance(step, RoundedLayer):
            found = _layer_weights(step, program.formats[step.sums.source], scales)
        elif isinstance(step, PoolAverage):
            found = _average_weights(step, program, scales)
        else:
            continue
        if found is None:
            return False
        scales.weights[step.output] = found
    return True


def _whole(steps: Sequence[Operation]) -> list[str]:
    """The values that are multiplied as whole numbers in float32, or rounded from such products.

    These are the last layer's input, factors and products, and whatever they come from unchanged.
    """
    makers = {step.output: step for step in steps}
    names = [step.sums.source for step in steps if isinstance(step, RealLayer)]
    for step in steps:
        if isinstance(step, RoundedProduct):
            names += [step.left, step.right, step.output]
    for name in names:
        maker = makers.get(name)
        if isinstance(maker, FlattenCodes | PoolMax | Rearrange):
            names.append(maker.source)
    return names


def _weight_scale(multiplier: Vector, before: np.float32, after: np.float32) -> Vector:
    """`k` with `fl(fl(before * k) / after)` equal to the multiplier, or as near as there is."""
    exact = multiplier.astype(np.float64) * float(after) / float(before)
    first: Vector = exact.astype(np.float32)
    best = first.copy()
    for units in reversed(_UNITS_TRIED):
        tried = (first.view(np.int32) + np.int32(units)).view(np.float32)
        best = np.where(_multiplier(tried, before, after) == multiplier, tried, best)
    return best


def _multiplier(weights: Vector, before: np.float32, after: np.float32) -> Vector:
    return np.asarray(np.asarray(before * weights, np.float32) / after, np.float32)


def _layer_weights(step: RoundedLayer, source: CodeFormat, scales: Scales) -> Vector | None:
    before, after = scales.of(step.sums.source), scales.of(step.output)
    weights = _weight_scale(np.maximum(step.multiplier, MIN_MULTIPLIER), before, after)
    got = _multiplier(weights, before, after)
    if (got < MIN_MULTIPLIER).any():
        return None
    rows = np.abs(integer_weights(step.sums.codes, step.sums.bits).astype(np.int64)).reshape(len(got), -1)
    reach = rows.sum(axis=1) * source.bound
    ends = (step.sums.bias - reach, step.sums.bias + reach)
    # Where the multiplier is another, all sums there can be must have one code, and it must be the same.
    codes = [
        np.clip(np.rint(end.astype(np.float32) * multiplier), step.low, step.high)
        for end in ends
        for multiplier in (step.multiplier, got)
    ]
    constant = np.all([code == codes[0] for code in codes], axis=0)
    return weights if bool(np.all(constant | (got == step.multiplier))) else None


def _average_weights(step: PoolAverage, program: IntegerProgram, scales: Scales) -> Vector | None:
    """Tried on every sum of codes that a window can have."""
    channels, *image = program.graph.shapes[step.source]
    kernel = step.op.kernel if isinstance(step.op, AvgPool) else tuple(image)
    source, window = program.formats[step.source], kernel[0] * kernel[1]
    before, after = scales.of(step.source), scales.of(step.output)
    multiplier = step.multipliers[0, 0]
    weights = _weight_scale(np.full(channels, multiplier, np.float32), before, after)
    sums = np.arange(source.low * window, source.high * window + 1, dtype=np.float32)
    wanted, got = (
        np.clip(np.rint(sums * each), step.low, step.high)
        for each in (multiplier, _multiplier(weights, before, after)[0])
    )
    return weights if np.array_equal(wanted, got) else None
