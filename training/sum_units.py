"""Additions in training: codes and codes, or codes alone, rounded anew."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass

import numpy as np

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.native_plan import SumUnit


@dataclass(frozen=True)
class SumForward:
    """A sum whose forward call is bound."""

    unit: SumUnit
    left: Tensor
    right: Tensor | None
    target: Tensor
    states: StepBuffer
    """Where each sum fell: inside the range of codes, above or below."""
    quotient: c_float
    """What codes alone are multiplied by: their scale over that of the sum."""
    add: Call
    next_spares: bool
    """Whether the unit before, which is next in the backward pass, reads this sum's error and spares it."""

    @classmethod
    def bind(cls, unit: SumUnit, binding: Binding) -> SumForward:
        last = next(reversed(binding.tensors))
        left, *others = (binding.tensors[name] for name in unit.sources)
        right = others[0] if others else None
        target = binding.quantized_tensor(left.images, left.shape, unit.quantizer)
        binding.tensors[unit.output] = target
        states = binding.layout.buffer(left.images * -(-left.elements // 4), np.uint8)
        quotient = c_float()
        # Codes alone are a sum with nothing, and the integer program multiplies them by one quotient.
        scales = (quotient, c_float(0), c_float(1))
        if right is not None:
            scales = (left.number, right.number, target.number)
        add = bound.add(
            left.codes,
            scales[0],
            (right or left).codes,
            scales[1],
            left.images,
            left.elements,
            scales[2],
            target.low,
            target.high,
            target.pairs,
            binding.threads,
            target.buffer,
            states,
        )
        spares = last in unit.sources and last in binding.sparing
        binding.bind(add, f"the scale of {unit.output!r}")
        return cls(unit, left, right, target, states, quotient, add, spares)

    def bind_backward(self, binding: Binding) -> Sum:
        layout, target, sources = binding.layout, self.target, self.unit.sources
        clipped = layout.buffer(2, np.float64)
        error = binding.errors.pop(self.unit.output)
        passing = bound.pass_error(
            self.states, target.images, target.elements, binding.threads, error, clipped
        )
        clip = bound.clip_gradient(
            clipped, self.unit.quantizer.op.signed, binding.side.clip_gradient(self.unit.quantizer)
        )
        calls = binding.bind(passing), binding.bind(clip)
        copy = None
        adds = []
        if len(sources) == 2:
            copy = self._copy_of(error, binding)
            adds.append(binding.deliver(sources[1], error if copy is None else copy))
        adds.append(binding.deliver(sources[0], error))
        added = tuple(add for add in adds if add is not None)
        return Sum(self, SumBackward(*calls, error, copy, added))

    def forward_only(self) -> Sum:
        return Sum(self, None)

    def _copy_of(self, error: Buffer, binding: Binding) -> StepBuffer | None:
        """Room for a copy of the error, if both sources cannot share it.

        Whoever passes an error on may change it in place, unless it is next and spares an error that is
        another value's too.
        """
        left, right = self.unit.sources
        apart = not self.next_spares or left == right
        if not apart or right in binding.errors or right in binding.unlearnt:
            return None
        copy = binding.layout.buffer(error.count, np.uint16)
        binding.layout.use(error, copy)
        return copy


@dataclass(frozen=True)
class SumBackward:
    """The backward calls of a sum, bound."""

    pass_error: Call
    clip: Call
    """The gradient of the quantizer's clip."""
    error: Buffer
    copy: StepBuffer | None
    """The error again, for a second source that must have its own."""
    add_errors: tuple[Call, ...]

    def make_copy(self) -> None:
        assert self.copy is not None
        np.copyto(self.copy.array, self.error.array)


class Sum(StepUnit):
    """An addition of codes, or codes alone, rounded anew."""

    def __init__(self, forward: SumForward, backward: SumBackward | None) -> None:
        self.bound, self.backward_bound = forward, backward
        self.forward = (forward.add,)
        if backward is not None:
            copied = () if backward.copy is None else (backward.make_copy,)
            self.backward = backward.pass_error, backward.clip, *copied, *backward.add_errors

    def settle(self, scratch: Scratch) -> Sum:
        return self

    def prepare(self) -> None:
        this = self.bound
        if this.right is None:
            this.quotient.value = this.left.scale / this.target.scale
