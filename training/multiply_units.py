"""Products of codes in training; what was clipped follows from the factors, which are kept anyway."""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass

import numpy as np

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor, single
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
        channels, height, width = left.shape
        target = binding.quantized_tensor(left.images, left.shape, unit.quantizer)
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
        passing = bound.multiply_backward(
            left.codes,
            right.codes,
            self.extent,
            self.spread,
            self.multiplier,
            target.low,
            target.high,
            left.number,
            right.number,
            error,
            binding.threads,
            error,
            right_error,
            clipped,
        )
        clip = bound.clip_gradient(
            clipped, self.unit.quantizer.op.signed, binding.side.clip_gradient(self.unit.quantizer)
        )
        calls = binding.bind(passing), binding.bind(clip)
        errors = zip(self.unit.sources, (error, right_error), strict=True)
        adds = [binding.deliver(source, own) for source, own in errors]
        return Multiplying(self, (*calls, *(add for add in adds if add is not None)))

    def forward_only(self) -> Multiplying:
        return Multiplying(self, ())


class Multiplying(StepUnit):
    """A product of codes, rounded, ready to run."""

    def __init__(self, forward: MulForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = (forward.run,), backward

    def settle(self, scratch: Scratch) -> Multiplying:
        return self

    def prepare(self) -> None:
        this = self.bound
        multiplier = single(single(this.left.scale * this.right.scale) / this.target.scale)
        if not math.isfinite(multiplier):
            raise NotFinite(f"the scale of {this.unit.output!r} is not finite")
        this.multiplier.value = multiplier
