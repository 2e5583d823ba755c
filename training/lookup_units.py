"""Functions of codes in training: one table from codes to codes forward, one of slopes back.

Whether a value was clipped follows from the code it is of, so the backward pass keeps nothing but the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.model.activations import CodeFormat, code_bounds
from fedmpq.model.lookup_tables import code_table, real_tables
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, Tensor
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
        source, op = binding.tensors[unit.source], unit.quantizer.op
        target = binding.new_tensor(source.images, source.shape, *code_bounds(op.bits, op.signed))
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
        binding.bind(passing)
        binding.layout.use(clipped)
        added = binding.deliver(self.unit.source, error)
        clip = binding.side.clip_gradient(self.unit.quantizer)
        calls = (passing,) if added is None else (passing, added)
        return Looking(self, LookupBackward(calls, clipped, clip))

    def forward_only(self) -> Looking:
        return Looking(self, None)


@dataclass(frozen=True)
class LookupBackward:
    """The backward calls of a function, bound."""

    calls: tuple[Call, ...]
    clipped: StepBuffer
    """The sums of errors that were clipped above and below."""
    clip: NDArray[np.float32]
    """The gradient of the quantizer's clip, one element."""


class Looking:
    """A function of codes, rounded, ready to run."""

    def __init__(self, forward: LookupForward, backward: LookupBackward | None) -> None:
        self.bound, self._back = forward, backward

    def settle(self, scratch: Scratch) -> Looking:
        return self

    def forward(self) -> None:
        this = self.bound
        this.tables.fill(this.unit, this.source.form, this.target.form)
        this.run()

    def backward(self) -> None:
        back = self._back
        assert back is not None
        passing, *added = back.calls
        passing()
        # What comes next may take the place of these sums.
        above, below = back.clipped.array.tolist()
        back.clip[0] = above - below if self.bound.unit.quantizer.op.signed else above
        for add in added:
            add()
