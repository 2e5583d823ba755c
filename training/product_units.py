"""Layers in training: products forward and backward, BatchNorm and rounding between them, the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Conv
from fedmpq.model.activations import code_bounds
from fedmpq.model.native_products import conv_of
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, Tensor
from fedmpq.training.learner import Learner
from fedmpq.training.losses import bind_loss
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import ProductUnit, Quantizer
from fedmpq.training.normalization import BoundMap, BoundNormMap
from fedmpq.training.side_tensors import NotFinite, all_finite, clip_gradient

Vector = NDArray[np.float32]

# With so many products or more in each, it takes longer to compute accumulators again than to keep them.
_WORTH_KEEPING = 64


@dataclass(frozen=True)
class Kept:
    """Accumulators as 16-bit numbers for the backward pass, if there is room for them."""

    buffer: StepBuffer
    keep: Call


@dataclass(frozen=True)
class ProductForward:
    """A layer whose forward calls are bound."""

    unit: ProductUnit
    quantizer: Quantizer
    layer: TrainedLayer
    source: Tensor
    target: Tensor
    conv: Conv
    weights: StepBuffer
    multiply: Call
    kept: Kept | None
    map: BoundMap
    requantize: Call

    @classmethod
    def bind(cls, unit: ProductUnit, quantizer: Quantizer, binding: Binding) -> ProductForward:
        source, layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        conv = conv_of(unit.op, source.images, *source.shape[1:])
        shape = conv.out_channels, conv.out_height, conv.out_width
        bounds = code_bounds(quantizer.op.bits, quantizer.op.signed)
        target = binding.new_tensor(conv.images, shape, *bounds)
        binding.tensors[unit.output] = target
        binding.sparing.add(unit.output)
        weights = binding.layout.buffer(conv.weights, np.int8)
        acc = binding.layout.buffer(conv.images * conv.outputs, np.int32)
        sums = None if unit.norm is None else binding.scratch.sums
        multiply = binding.bind(bound.conv_forward(conv, source.codes, weights, binding.threads, acc, sums))
        kept = None if unit.output in binding.unlearnt else _bind_keeping(conv, acc, binding)
        channel_map = _bind_map(unit, conv, layer, target, binding)
        requantize = binding.bind(
            bound.requantize(
                acc, _extent(conv), channel_map.rescale, target.pairs, binding.threads, target.buffer
            )
        )
        return cls(
            unit, quantizer, layer, source, target, conv, weights, multiply, kept, channel_map, requantize
        )

    def bind_backward(self, binding: Binding) -> BoundProduct:
        conv, layout, threads, this_map = self.conv, binding.layout, binding.threads, self.map
        error = binding.errors.pop(self.unit.output)
        shared = any(other is error for other in binding.errors.values())
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        sum_up, sum_kept = self._bind_sums(error, acc, binding)
        means = layout.buffer(2 * conv.out_channels, np.float32)
        mean_g, mean_gx = means.split(2)
        greatest = layout.buffer(conv.images, np.float32)
        turned = layout.buffer(error.count, np.uint16) if shared else error
        layout.use(binding.scratch.sums, binding.scratch.work, means)
        turn = binding.bind(
            bound.backward_error(
                acc,
                error,
                _extent(conv),
                this_map.rescale,
                this_map.normalize,
                this_map.gain,
                mean_g,
                mean_gx,
                threads,
                turned,
                greatest,
            )
        )
        learner = Learner(self.unit, conv, self.weights, turned, binding)
        gradients = binding.side.clip_gradient(self.quantizer), self._side_gradients(binding)
        backward = ProductBackward(sum_up, sum_kept, means, greatest, turn, learner, *gradients)
        return BoundProduct(self, backward)

    def forward_only(self) -> BoundProduct:
        return BoundProduct(self, None)

    def _bind_sums(self, error: Buffer, acc: StepBuffer, binding: Binding) -> tuple[Call, Call | None]:
        """The calls that sum errors up by channel: with products computed again, and with those kept."""
        conv, maps, sums = self.conv, (self.map.rescale, self.map.normalize), binding.scratch.sums
        again = bound.conv_backward_sums(
            conv, self.source.codes, self.weights, error, *maps, binding.threads, acc, sums
        )
        binding.bind(again)
        if self.kept is None:
            return again, None
        kept = bound.kept_backward_sums(
            self.kept.buffer, _extent(conv), error, *maps, binding.threads, acc, sums
        )
        return again, binding.bind(kept)

    def _side_gradients(self, binding: Binding) -> tuple[Vector, ...]:
        """Where gradients go that are sums over a channel; a bias before BatchNorm changes nothing."""
        side, norm = binding.side, self.unit.norm
        names = [f"{norm.name}.bias", f"{norm.name}.weight"] if norm is not None else []
        names += [f"{self.unit.node.name}.bias"] if norm is None and self.unit.op.bias else []
        return tuple(side.gradients[side.places[name]] for name in names)


@dataclass(frozen=True)
class ProductBackward:
    """The backward calls of a layer, bound."""

    sum_up: Call
    sum_kept: Call | None
    means: StepBuffer
    """BatchNorm's means of the errors and of the errors times the normalized values, by channel."""
    greatest: StepBuffer
    turn: Call
    """Errors of the codes to errors of the accumulators."""
    learner: Learner
    clip: Vector
    """The gradient of the quantizer's clip, one element."""
    learnt: tuple[Vector, ...]
    """Gradients of beta and gamma, or of the bias, if there is one."""


@dataclass(frozen=True)
class BoundProduct:
    """A layer bound both ways, or forward alone."""

    forward: ProductForward
    backward: ProductBackward | None

    def settle(self, scratch: Scratch) -> Product:
        return Product(self.forward, self.backward, scratch)


class Product:
    """A layer with its BatchNorm and its rounding, ready to run.

    The backward pass computes accumulators again, unless there was room to keep them as 16-bit numbers.
    """

    def __init__(self, forward: ProductForward, backward: ProductBackward | None, scratch: Scratch) -> None:
        self.bound, self._backward = forward, backward
        conv = forward.conv
        channels = conv.out_channels
        rows = scratch.sum_rows(channels)
        self._map = forward.map.settle(scratch)
        self._weights: NDArray[np.int8] = forward.weights.array
        self._sums = scratch.sums.array[: 4 * channels]
        self._of_errors, self._above, self._below = rows[:2], rows[2], rows[3]
        self._pair = scratch.work_rows(channels)[:2]
        self._rows = rows
        self._count = conv.images * conv.pixels
        self._keep = forward.kept.keep if forward.kept is not None and forward.kept.buffer.placed else None
        self._sum_up: Call | None = None

    @property
    def _back(self) -> ProductBackward:
        assert self._backward is not None, "nothing is learnt here"
        return self._backward

    @property
    def learner(self) -> Learner:
        return self._back.learner

    @property
    def has_room(self) -> bool:
        """Whether there is room to keep accumulators."""
        return self._keep is not None

    @property
    def is_kept(self) -> bool:
        """Whether the step under way has kept them."""
        return self._sum_up is not None

    def forward(self) -> None:
        this = self.bound
        this.layer.integer_weights(self._weights)
        this.multiply()
        self._sum_up = self._keep_if_small()
        self._map.compute(this.source.scale, this.target.scale)
        if not all_finite(self._map.t):
            raise NotFinite(f"the scale of layer {this.unit.node.name!r} is not finite")
        this.requantize()

    def _keep_if_small(self) -> Call | None:
        """Keep the accumulators, if there is room and they fit 16 bits; what then sums up errors."""
        return self._back.sum_kept if self._keep is not None and self._keep() == 1 else None

    def backward(self) -> None:
        (self._sum_up or self._back.sum_up)()
        if not all_finite(self._sums):
            raise NotFinite(f"the error of layer {self.bound.unit.node.name!r} is not finite")
        self._differentiate_side()
        self._back.turn()
        self.learner.learn(float(np.maximum.reduce(self._back.greatest.array)))

    def _differentiate_side(self) -> None:
        """The gradients of side tensors from the sums over each channel, and BatchNorm's means."""
        self._back.clip[0] = clip_gradient(self.bound.quantizer.op, self._above, self._below)
        for gradient, row in zip(self._back.learnt, self._rows, strict=False):
            gradient[...] = row
        means = self._back.means.array.reshape(2, -1)
        if self.bound.unit.norm is None:
            means[...] = 0.0
        else:
            np.divide(self._of_errors, self._count, self._pair)
            means[...] = self._pair


@dataclass(frozen=True)
class LogitsForward:
    """The last layer, whose forward calls are bound."""

    unit: ProductUnit
    layer: TrainedLayer
    source: Tensor
    conv: Conv
    weights: StepBuffer
    multiply: Call
    scale: StepBuffer
    gradient: StepBuffer
    """The loss's, by logit."""
    loss: StepBuffer
    judge: Call
    """Loss, gradient and right answers from accumulators."""

    @classmethod
    def bind(cls, unit: ProductUnit, binding: Binding) -> LogitsForward:
        source, layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        conv = conv_of(unit.op, source.images, *source.shape[1:])
        layout, side, classes = binding.layout, binding.side, conv.out_channels
        weights = layout.buffer(conv.weights, np.int8)
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        multiply = binding.bind(bound.conv_forward(conv, source.codes, weights, binding.threads, acc, None))
        scale = layout.buffer(classes, np.float32)
        gradient = layout.buffer(conv.images * classes, np.float32)
        loss = layout.buffer(1, np.float64)
        place = side.places[f"{unit.node.name}.bias"] if unit.op.bias else None
        offset = np.zeros(classes, np.float32) if place is None else side.values[place]
        judge = binding.bind(
            bind_loss(binding.task, acc, conv.images, classes, scale, offset, binding.answers, gradient, loss)
        )
        return cls(unit, layer, source, conv, weights, multiply, scale, gradient, loss, judge)

    def bind_backward(self, binding: Binding) -> BoundLogits:
        conv, side, bias = self.conv, binding.side, f"{self.unit.node.name}.bias"
        error = binding.layout.buffer(conv.images * conv.outputs, np.uint16)
        halve = binding.bind(
            bound.halve_errors(self.gradient, conv.images, conv.out_channels, self.layer.scale, error)
        )
        learner = Learner(self.unit, conv, self.weights, error, binding)
        return BoundLogits(
            self, halve, learner, side.gradients[side.places[bias]] if self.unit.op.bias else None
        )

    def forward_only(self) -> BoundLogits:
        raise AssertionError("the last unit has the loss, and its error")


@dataclass(frozen=True)
class BoundLogits:
    """The last layer bound both ways."""

    forward: LogitsForward
    halve: Call
    """Gradients of the logits to bfloat16 errors of the accumulators."""
    learner: Learner
    bias: Vector | None
    """The gradient of the layer's bias."""

    def settle(self, scratch: Scratch) -> Logits:
        return Logits(self)


class Logits:
    """The last layer and the loss, ready to run."""

    def __init__(self, both: BoundLogits) -> None:
        self.bound, self.learner, self._back = both.forward, both.learner, both
        self._weights: NDArray[np.int8] = self.bound.weights.array
        conv = self.bound.conv
        self._rows: Vector = self.bound.gradient.array.reshape(conv.images, conv.out_channels)
        self.loss, self.right = 0.0, 0

    def forward(self) -> None:
        this = self.bound
        this.layer.integer_weights(self._weights)
        this.multiply()
        np.multiply(this.layer.scale, np.float32(this.source.scale), this.scale.array)
        if not all_finite(this.scale.array):
            raise NotFinite(f"the scale of layer {this.unit.node.name!r} is not finite")
        self.right = int(this.judge())
        self.loss = float(this.loss.array[0])
        if not math.isfinite(self.loss):
            raise NotFinite(f"the loss is {self.loss}")

    def backward(self) -> None:
        if self._back.bias is not None:
            # One image after the other: a sum in another order is another number.
            self._back.bias[...] = np.add.accumulate(self._rows)[-1]
        self.learner.learn(float(self._back.halve()))


def _bind_keeping(conv: Conv, acc: Buffer, binding: Binding) -> Kept | None:
    if conv.weights // conv.out_channels < _WORTH_KEEPING:
        return None
    buffer = binding.layout.spare_buffer(conv.images * conv.outputs, np.int16)
    return Kept(buffer, binding.bind(bound.keep(acc, conv.images, conv.outputs, binding.threads, buffer)))


def _bind_map(
    unit: ProductUnit, conv: Conv, layer: TrainedLayer, target: Tensor, binding: Binding
) -> BoundMap:
    side = binding.side
    offset = side.values[side.places[f"{unit.node.name}.bias"]] if unit.op.bias else None
    if unit.norm is None:
        return BoundMap(conv, layer.scale, offset, target, binding)
    return BoundNormMap(conv, layer.scale, offset, target, binding, unit.norm, layer.scale)


def _extent(conv: Conv) -> FedmpqExtent:
    """The layer's accumulators."""
    return FedmpqExtent(conv.images, conv.pixels, conv.out_channels)
