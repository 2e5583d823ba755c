"""Logits that are codes, such as the means over an image with which a fully convolutional network ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.losses import bind_loss
from fedmpq.training.native_plan import ScoreUnit
from fedmpq.training.side_tensors import NotFinite


@dataclass(frozen=True)
class ScoresForward:
    """The loss of codes, whose forward call is bound."""

    unit: ScoreUnit
    source: Tensor
    codes: StepBuffer
    scale: StepBuffer
    gradient: StepBuffer
    """The loss's, by logit."""
    loss: StepBuffer
    judge: Call

    @classmethod
    def bind(cls, unit: ScoreUnit, binding: Binding) -> ScoresForward:
        source, layout = binding.tensors[unit.source], binding.layout
        images, classes = source.images, source.elements
        codes, gradient = (layout.buffer(images * classes, dtype) for dtype in (np.int32, np.float32))
        scale, loss = layout.buffer(classes, np.float32), layout.buffer(1, np.float64)
        layout.use(source.buffer, codes)
        zeros = np.zeros(classes, np.float32)
        shift, answers = binding.shift, binding.answers
        judge = bind_loss(binding.task, codes, images, classes, scale, zeros, shift, answers, gradient, loss)
        return cls(unit, source, codes, scale, gradient, loss, binding.bind(judge))

    def bind_backward(self, binding: Binding) -> Scores:
        images, classes = self.source.images, self.source.elements
        error = binding.layout.buffer(images * classes, np.uint16)
        ones = np.ones(classes, np.float32)
        greatest = np.zeros(1, np.float32)
        halve = binding.bind(bound.halve_errors(self.gradient, images, classes, ones, error, greatest))
        binding.deliver(self.unit.source, error)
        return Scores(self, halve)

    def forward_only(self) -> Scores:
        raise AssertionError("the last unit has the loss, and its error")


class Scores(StepUnit):
    """The loss of codes, ready to run."""

    def __init__(self, forward: ScoresForward, halve: Call) -> None:
        self.bound = forward
        self.loss, self.right = 0.0, 0
        self.forward, self.backward = (self._judge,), (halve,)

    def settle(self, scratch: Scratch) -> Scores:
        return self

    def _judge(self) -> None:
        this = self.bound
        np.add(this.source.unpaired().reshape(-1), np.int32(this.source.low), this.codes.array)
        this.scale.array[...] = this.source.scale
        self.right = int(this.judge())
        self.loss = float(this.loss.array[0])
        if not math.isfinite(self.loss):
            raise NotFinite(f"the loss is {self.loss}")
