"""Functions of codes in training: one table from codes to codes forward, one of slopes back.

Whether a value was clipped follows from the code it is of, so the backward pass keeps nothing but the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.model.activations import CodeFormat
from fedmpq.model.lookup_tables import code_table, real_tables
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.native_plan import LookupUnit


@dataclass(frozen=True)
class Tables:
    """What the kernels look up, by stored code; entries of codes that do not exist stay zero."""

    codes: NDArray[np.uint8]
    slopes: NDArray[np.float32]
    states: NDArray[np.uint8]
    """Where the value falls: 0 inside the range of codes, 1 above, 2 below."""

    @classmethod
    def empty(cls) -> Tables:
        size = bound.TABLE
        return cls(np.zeros(size, np.uint8), np.zeros(size, np.float32), np.zeros(size, np.uint8))

    def fill(self, unit: LookupUnit, source: CodeFormat, target: CodeFormat) -> None:
        values, slopes = real_tables(unit.op, source)
        top = float(target.scale) * target.high
        bottom = -top if target.low < 0 else 0.0
        self.codes[: len(values)] = code_table(values, target) - target.low
        self.slopes[: len(values)] = slopes
        self.states[: len(values)] = np.where(values >= top, 1, np.where(values <= bottom, 2, 0))


@dataclass(frozen=True)
class LookupForward:
    """A function whose forward call is bound."""

    unit: LookupUnit
    source: Tensor
    target: Tensor
    tables: Tables
    run: Call

    @classmethod
    def bind(cls, unit: LookupUnit, binding: Binding) -> LookupForward:
        source = binding.tensors[unit.source]
        target = binding.quantized_tensor(source.images, source.shape, unit.quantizer)
        binding.tensors[unit.output] = target
        tables, size = Tables.empty(), (source.images, source.elements)
        run = bound.lookup(source.codes, *size, tables.codes, target.pairs, binding.threads, target.buffer)
        return cls(unit, source, target, tables, binding.bind(run))

    def bind_backward(self, binding: Binding) -> Looking:
        source, tables = self.source, self.tables
        error = binding.errors.pop(self.unit.output)
        clipped = binding.layout.buffer(2, np.float64)
        passing = bound.lookup_backward(
            source.codes,
            source.images,
            source.elements,
            tables.slopes,
            tables.states,
            binding.threads,
            error,
            clipped,
        )
        clip = bound.clip_gradient(
            clipped, self.unit.quantizer.op.signed, binding.side.clip_gradient(self.unit.quantizer)
        )
        calls = binding.bind(passing), binding.bind(clip)
        added = binding.deliver(self.unit.source, error)
        return Looking(self, calls if added is None else (*calls, added))

    def forward_only(self) -> Looking:
        return Looking(self, ())


class Looking(StepUnit):
    """A function of codes, rounded, ready to run."""

    def __init__(self, forward: LookupForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = (forward.run,), backward

    def settle(self, scratch: Scratch) -> Looking:
        return self

    def prepare(self) -> None:
        this = self.bound
        this.tables.fill(this.unit, this.source.form, this.target.form)
