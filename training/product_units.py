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
from fedmpq.model.native_products import conv_of
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.learner import Learner
from fedmpq.training.losses import bind_loss
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import ProductUnit, Quantizer
from fedmpq.training.normalization import BoundMap, BoundNormMap, SideGradients
from fedmpq.training.side_tensors import NotFinite, all_finite

Vector = NDArray[np.float32]

# With so many products or more in each, it takes longer to compute accumulators again than to keep them.
_WORTH_KEEPING = 64

# Accumulators of so many bytes or more leave the caches: to store and read them takes longer than to compute
# them again for each use, if so few products or fewer are in each.
_MANY_BYTES = 8_000_000
_FEW_PRODUCTS = 32


@dataclass(frozen=True)
class Kept:
    """Accumulators as 16-bit numbers for the backward pass, if there is room for them."""

    buffer: StepBuffer
    fit: NDArray[np.int32]
    """1 if they are small enough in the step under way, else 0: then they are computed again."""
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
    multiply: Call
    kept: Kept | None
    map: BoundMap
    compute: Call
    """The map of the step under way."""
    requantize: Call
    stored: bool
    """Whether accumulators are stored between the calls that use them, or computed by each of these."""

    @classmethod
    def bind(cls, unit: ProductUnit, quantizer: Quantizer, binding: Binding) -> ProductForward:
        source, layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        conv = conv_of(unit.op, source.images, *source.shape[1:])
        shape = conv.out_channels, conv.out_height, conv.out_width
        target = binding.quantized_tensor(conv.images, shape, quantizer)
        binding.tensors[unit.output] = target
        binding.sparing.add(unit.output)
        acc = _bind_accumulators(unit, conv, binding)
        sums = None if unit.norm is None else binding.scratch.sums
        codes, weights, threads = source.codes, layer.weights, binding.threads
        multiply = binding.bind(bound.conv_forward(conv, codes, weights, threads, acc, sums))
        kept = None if acc is None or unit.output in binding.unlearnt else _bind_keeping(conv, acc, binding)
        channel_map = _bind_map(unit, conv, layer, source, target, binding)
        compute = channel_map.bind(binding, f"layer {unit.node.name!r}")
        rest = channel_map.rescale, target.pairs, threads, target.buffer
        requantize = (
            bound.conv_requantize(conv, codes, weights, *rest)
            if acc is None
            else bound.requantize(acc, _extent(conv), *rest)
        )
        calls = multiply, kept, channel_map, compute, binding.bind(requantize)
        return cls(unit, quantizer, layer, source, target, conv, *calls, acc is not None)

    def bind_backward(self, binding: Binding) -> BoundProduct:
        conv, layout, threads, this_map = self.conv, binding.layout, binding.threads, self.map
        error = binding.errors.pop(self.unit.output)
        shared = any(other is error for other in binding.errors.values())
        acc = layout.buffer(conv.images * conv.outputs, np.int32) if self.stored else None
        kept = None if self.kept is None else (self.kept.buffer, self.kept.fit)
        sum_up = binding.bind(
            bound.conv_backward_sums(
                conv,
                self.source.codes,
                self.layer.weights,
                kept,
                error,
                this_map.rescale,
                this_map.normalize,
                threads,
                acc,
                binding.scratch.sums,
            )
        )
        name = f"layer {self.unit.node.name!r}"
        side = SideGradients(
            name, conv, self.quantizer, self._side_gradients(binding), self.unit.norm, binding
        )
        greatest = layout.buffer(conv.images, np.float32)
        turned = layout.buffer(error.count, np.uint16) if shared else error
        maps = this_map.rescale, this_map.normalize, this_map.gain
        rest = *maps, *side.means, threads, turned, greatest
        turn = binding.bind(
            bound.conv_backward_error(conv, self.source.codes, self.layer.weights, error, *rest)
            if acc is None
            else bound.backward_error(acc, error, _extent(conv), *rest)
        )
        learner = Learner(self.unit, conv, turned, greatest, conv.images, binding)
        return BoundProduct(self, ProductBackward(sum_up, side, turn, learner))

    def forward_only(self) -> BoundProduct:
        return BoundProduct(self, None)

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
    """Errors by channel, with accumulators that were kept or computed again."""
    side: SideGradients
    turn: Call
    """Errors of the codes to errors of the accumulators."""
    learner: Learner


@dataclass(frozen=True)
class BoundProduct:
    """A layer bound both ways, or forward alone."""

    forward: ProductForward
    backward: ProductBackward | None

    def settle(self, scratch: Scratch) -> Product:
        return Product(self.forward, self.backward)


class Product(StepUnit):
    """A layer with its BatchNorm and its rounding, ready to run.

    The backward pass computes accumulators again, unless there was room to keep them as 16-bit numbers.
    """

    def __init__(self, forward: ProductForward, backward: ProductBackward | None) -> None:
        self.bound, self._backward = forward, backward
        keep = (forward.kept.keep,) if forward.kept is not None and self.has_room else ()
        self.forward = forward.multiply, *keep, forward.compute, forward.requantize
        if backward is not None:
            learning = backward.learner.actions
            self.backward = backward.sum_up, backward.side.compute, backward.turn, *learning

    @property
    def learner(self) -> Learner:
        assert self._backward is not None, "nothing is learnt here"
        return self._backward.learner

    @property
    def has_room(self) -> bool:
        """Whether there is room to keep accumulators."""
        return self.bound.kept is not None and self.bound.kept.buffer.placed

    @property
    def is_kept(self) -> bool:
        """Whether the step under way has kept them."""
        return self.bound.kept is not None and bool(self.bound.kept.fit[0])


@dataclass(frozen=True)
class LogitsForward:
    """The last layer, whose forward calls are bound."""

    unit: ProductUnit
    layer: TrainedLayer
    source: Tensor
    conv: Conv
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
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        product = conv, source.codes, layer.weights
        multiply = binding.bind(bound.conv_forward(*product, binding.threads, acc, None))
        scale = layout.buffer(classes, np.float32)
        gradient = layout.buffer(conv.images * classes, np.float32)
        loss = layout.buffer(1, np.float64)
        place = side.places[f"{unit.node.name}.bias"] if unit.op.bias else None
        offset = np.zeros(classes, np.float32) if place is None else side.values[place]
        judge = binding.bind(
            bind_loss(
                binding.task,
                acc,
                conv.images,
                classes,
                scale,
                offset,
                binding.shift,
                binding.answers,
                gradient,
                loss,
            )
        )
        return cls(unit, layer, source, conv, multiply, scale, gradient, loss, judge)

    def bind_backward(self, binding: Binding) -> BoundLogits:
        conv, side, bias = self.conv, binding.side, f"{self.unit.node.name}.bias"
        error = binding.layout.buffer(conv.images * conv.outputs, np.uint16)
        rows, greatest = (conv.images, conv.out_channels), np.zeros(1, np.float32)
        halve = binding.bind(bound.halve_errors(self.gradient, *rows, self.layer.scale, error, greatest))
        learner = Learner(self.unit, conv, error, greatest, 1, binding)
        gradient = side.gradients[side.places[bias]] if self.unit.op.bias else None
        return BoundLogits(self, halve, learner, gradient)

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


class Logits(StepUnit):
    """The last layer and the loss, ready to run."""

    def __init__(self, both: BoundLogits) -> None:
        self.bound, self.learner, self._bias = both.forward, both.learner, both.bias
        conv = self.bound.conv
        self._rows: Vector = self.bound.gradient.array.reshape(conv.images, conv.out_channels)
        self.loss, self.right = 0.0, 0
        self.forward = self.bound.multiply, self._judge
        self.backward = self._sum_up, both.halve, *both.learner.actions

    def _judge(self) -> None:
        this = self.bound
        np.multiply(this.layer.scale, np.float32(this.source.scale), this.scale.array)
        if not all_finite(this.scale.array):
            raise NotFinite(f"the scale of layer {this.unit.node.name!r} is not finite")
        self.right = int(this.judge())
        self.loss = float(this.loss.array[0])
        if not math.isfinite(self.loss):
            raise NotFinite(f"the loss is {self.loss}")

    def _sum_up(self) -> None:
        if self._bias is not None:
            # One image after the other: a sum in another order is another number.
            self._bias[...] = np.add.accumulate(self._rows)[-1]


def _bind_accumulators(unit: ProductUnit, conv: Conv, binding: Binding) -> StepBuffer | None:
    """Memory for accumulators; none where it takes less time to compute them again for each use."""
    count = conv.images * conv.outputs
    few = conv.weights // conv.out_channels <= _FEW_PRODUCTS and count * 4 >= _MANY_BYTES
    whole_bytes = conv.out_width * conv.out_channels % 2 == 0  # of every row
    # Without BatchNorm's sums, codes would need no product before the one that makes them.
    if few and whole_bytes and conv.groups in (1, conv.channels) and unit.norm is not None:
        return None
    return binding.layout.buffer(count, np.int32)


def _bind_keeping(conv: Conv, acc: Buffer, binding: Binding) -> Kept | None:
    if conv.weights // conv.out_channels < _WORTH_KEEPING:
        return None
    buffer, fit = binding.layout.spare_buffer(conv.images * conv.outputs, np.int16), np.zeros(1, np.int32)
    keep = bound.keep(acc, conv.images, conv.outputs, binding.threads, buffer, fit)
    return Kept(buffer, fit, binding.bind(keep))


def _bind_map(
    unit: ProductUnit, conv: Conv, layer: TrainedLayer, source: Tensor, target: Tensor, binding: Binding
) -> BoundMap:
    side = binding.side
    offset = side.values[side.places[f"{unit.node.name}.bias"]] if unit.op.bias else None
    if unit.norm is None:
        return BoundMap(conv, layer.scale, offset, source, target, binding)
    return BoundNormMap(conv, layer.scale, offset, source, target, binding, unit.norm, layer.scale)


def _extent(conv: Conv) -> FedmpqExtent:
    """The layer's accumulators."""
    return FedmpqExtent(conv.images, conv.pixels, conv.out_channels)
