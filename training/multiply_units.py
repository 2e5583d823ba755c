"""Products of codes in training; what was clipped follows from the factors, which are kept anyway."""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.model.activations import code_bounds
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, Tensor, single
from fedmpq.training.native_plan import MulUnit
from fedmpq.training.side_tensors import NotFinite


@dataclass(frozen=True)
class MulForward:
    """A product whose forward call is bound."""

    unit: MulUnit
    left: Tensor
    right: Tensor
    target: Tensor
    extent: FedmpqExtent
    multiplier: c_float
    run: Call

    @property
    def spread(self) -> bool:
        """Whether the right factor has one pixel, which multiplies all of the left one's."""
        return self.right.shape != self.left.shape

    @classmethod
    def bind(cls, unit: MulUnit, binding: Binding) -> MulForward:
        left, right = (binding.tensors[name] for name in unit.sources)
        op, (channels, height, width) = unit.quantizer.op, left.shape
        target = binding.new_tensor(left.images, left.shape, *code_bounds(op.bits, op.signed))
        binding.tensors[unit.output] = target
        extent, multiplier = FedmpqExtent(left.images, height * width, channels), c_float()
        run = bound.multiply(
            left.codes,
            right.codes,
            extent,
            right.shape != left.shape,
            multiplier,
            target.low,
            target.high,
            target.pairs,
            binding.threads,
            target.buffer,
        )
        return cls(unit, left, right, target, extent, multiplier, binding.bind(run))

    def bind_backward(self, binding: Binding) -> Multiplying:
        left, right, target = self.left, self.right, self.target
        error = binding.errors.pop(self.unit.output)
        right_error = binding.layout.buffer(right.images * right.elements, np.uint16)
        clipped = binding.layout.buffer(2, np.float64)
        scales = c_float(), c_float()
        passing = bound.multiply_backward(
            left.codes,
            right.codes,
            self.extent,
            self.spread,
            self.multiplier,
            target.low,
            target.high,
            *scales,
            error,
            binding.threads,
            error,
            right_error,
            clipped,
        )
        binding.bind(passing)
        binding.layout.use(clipped)
        errors = zip(self.unit.sources, (error, right_error), strict=True)
        adds = [binding.deliver(source, own) for source, own in errors]
        clip = binding.side.clip_gradient(self.unit.quantizer)
        calls = tuple(add for add in adds if add is not None)
        return Multiplying(self, MulBackward(passing, scales, calls, clipped, clip))

    def forward_only(self) -> Multiplying:
        return Multiplying(self, None)


@dataclass(frozen=True)
class MulBackward:
    """The backward calls of a product, bound."""

    passing: Call
    scales: tuple[c_float, c_float]
    """Of the left and of the right factor."""
    add_errors: tuple[Call, ...]
    clipped: StepBuffer
    """The sums of errors that were clipped above and below."""
    clip: NDArray[np.float32]
    """The gradient of the quantizer's clip, one element."""


class Multiplying:
    """A product of codes, rounded, ready to run."""

    def __init__(self, forward: MulForward, backward: MulBackward | None) -> None:
        self.bound, self._back = forward, backward

    def settle(self, scratch: Scratch) -> Multiplying:
        return self

    def forward(self) -> None:
        this = self.bound
        multiplier = single(single(this.left.scale * this.right.scale) / this.target.scale)
        if not math.isfinite(multiplier):
            raise NotFinite(f"the scale of {this.unit.output!r} is not finite")
        this.multiplier.value = multiplier
        this.run()

    def backward(self) -> None:
        this, back = self.bound, self._back
        assert back is not None
        for held, tensor in zip(back.scales, (this.left, this.right), strict=True):
            held.value = tensor.scale
        back.passing()
        above, below = back.clipped.array.tolist()
        back.clip[0] = above - below if this.unit.quantizer.op.signed else above
        for add in back.add_errors:
            add()
