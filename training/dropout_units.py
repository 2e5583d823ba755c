"""Dropout in training: what a layer reads, with some of it zero."""

from __future__ import annotations

from dataclasses import dataclass

from fedmpq.kernels import bound_shapes
from fedmpq.kernels.call import Call
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Counter
from fedmpq.model.randomness import Purpose
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor, single
from fedmpq.training.native_plan import DropUnit


@dataclass(frozen=True)
class DropForward:
    """A dropout whose forward call is bound."""

    unit: DropUnit
    source: Tensor
    target: Tensor
    extent: FedmpqExtent
    counter: Counter
    run: Call

    @classmethod
    def bind(cls, unit: DropUnit, binding: Binding) -> DropForward:
        source, dropout = binding.tensors[unit.source], unit.dropout
        channels, height, width = source.shape
        extent = FedmpqExtent(source.images, height * width, channels)
        target = binding.new_tensor(source.images, source.shape, source.low, source.high)
        counter = binding.draws.counter(unit.index)
        run = bound_shapes.drop(
            source.codes,
            extent,
            dropout.whole_channels,
            dropout.rate,
            counter,
            Purpose.DROPOUT,
            binding.step,
            binding.threads,
            target.buffer,
        )
        binding.tensors[unit.output] = target
        return cls(unit, source, target, extent, counter, binding.bind(run))

    def bind_backward(self, binding: Binding) -> Dropping:
        error, dropout = binding.errors.pop(self.unit.output), self.unit.dropout
        back = bound_shapes.drop_errors(
            self.extent,
            dropout.whole_channels,
            dropout.rate,
            float(dropout.factor),
            self.counter,
            Purpose.DROPOUT,
            binding.step,
            binding.threads,
            error,
        )
        calls = [binding.bind(back)]
        if (added := binding.deliver(self.unit.source, error)) is not None:
            calls.append(added)
        return Dropping(self, tuple(calls))

    def forward_only(self) -> Dropping:
        return Dropping(self, ())


class Dropping(StepUnit):
    """Codes of which some become 0; the scale of the others is larger by the dropout's factor."""

    def __init__(self, forward: DropForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = (forward.run,), backward

    def settle(self, scratch: Scratch) -> Dropping:
        return self

    def prepare(self) -> None:
        this = self.bound
        this.target.scale = single(this.source.scale * float(this.unit.dropout.factor))
