"""Additions in training: codes and codes, or codes alone, rounded anew."""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer
from fedmpq.model.activations import code_bounds
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, Tensor, single
from fedmpq.training.native_plan import SumUnit
from fedmpq.training.side_tensors import NotFinite


@dataclass(frozen=True)
class SumForward:
    """A sum whose forward call is bound."""

    unit: SumUnit
    left: Tensor
    right: Tensor | None
    target: Tensor
    states: StepBuffer
    """Where each sum fell: inside the range of codes, above or below."""
    left_scale: c_float
    right_scale: c_float
    step: c_float
    add: Call
    next_spares: bool
    """Whether the unit before, which is next in the backward pass, reads this sum's error and spares it."""

    @classmethod
    def bind(cls, unit: SumUnit, binding: Binding) -> SumForward:
        last = next(reversed(binding.tensors))
        left, *others = (binding.tensors[name] for name in unit.sources)
        right = others[0] if others else None
        op = unit.quantizer.op
        target = binding.new_tensor(left.images, left.shape, *code_bounds(op.bits, op.signed))
        binding.tensors[unit.output] = target
        states = binding.layout.buffer(left.images * -(-left.elements // 4), np.uint8)
        left_scale, right_scale, step = c_float(), c_float(), c_float()
        add = bound.add(
            left.codes,
            left_scale,
            (right or left).codes,
            right_scale,
            left.images,
            left.elements,
            step,
            target.low,
            target.high,
            target.pairs,
            binding.threads,
            target.buffer,
            states,
        )
        spares = last in unit.sources and last in binding.sparing
        scales = left_scale, right_scale, step
        return cls(unit, left, right, target, states, *scales, binding.bind(add), spares)

    def bind_backward(self, binding: Binding) -> Sum:
        layout, target, sources = binding.layout, self.target, self.unit.sources
        clipped = layout.buffer(2, np.float64)
        error = binding.errors.pop(self.unit.output)
        passing = bound.pass_error(
            self.states, target.images, target.elements, binding.threads, error, clipped
        )
        binding.bind(passing)
        layout.use(clipped)
        copy = None
        adds = []
        if len(sources) == 2:
            copy = self._copy_of(error, binding)
            adds.append(binding.deliver(sources[1], error if copy is None else copy))
        adds.append(binding.deliver(sources[0], error))
        calls = tuple(add for add in adds if add is not None)
        clip = binding.side.clip_gradient(self.unit.quantizer)
        return Sum(self, SumBackward(passing, clipped, error, copy, calls, clip))

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
    clipped: StepBuffer
    """The sums of errors that were clipped above and below."""
    error: Buffer
    copy: StepBuffer | None
    """The error again, for a second source that must have its own."""
    add_errors: tuple[Call, ...]
    clip: NDArray[np.float32]
    """The gradient of the quantizer's clip, one element."""


class Sum:
    """An addition of codes, or codes alone, rounded anew."""

    def __init__(self, forward: SumForward, backward: SumBackward | None) -> None:
        self.bound, self.backward_bound = forward, backward

    def settle(self, scratch: Scratch) -> Sum:
        return self

    def forward(self) -> None:
        this = self.bound
        left, target = this.left.scale, this.target.scale
        right = 0.0 if this.right is None else this.right.scale
        if this.right is None:
            # Codes alone are a sum with nothing, and the integer program multiplies them by one quotient.
            left, target = single(left / target), 1.0
        if not math.isfinite(single(max(left, right) / target)):
            raise NotFinite(f"the scale of {this.unit.output!r} is not finite")
        this.left_scale.value, this.right_scale.value, this.step.value = left, right, target
        this.add()

    def backward(self) -> None:
        this = self.backward_bound
        assert this is not None
        this.pass_error()
        above, below = this.clipped.array.tolist()
        this.clip[0] = above - below if self.bound.unit.quantizer.op.signed else above
        if this.copy is not None:
            np.copyto(this.copy.array, this.error.array)
        for add in this.add_errors:
            add()
