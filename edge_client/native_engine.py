"""The `native` engine: integer training in C++, no torch.

Forward, an image batch of codes runs through the units of the graph (native_plan); what is kept is codes,
4-bit ones packed in pairs. Backward, accumulators are computed again instead of kept; errors are bfloat16
between units and int8 with stochastic rounding inside products, so that all three products of a layer are
integer ones. A layer's codes are updated as soon as its gradient is known.

The same seed gives the same codes to the bit on every instruction set, machine and number of threads: sums
are integers or have a fixed order, and what is done in NumPy here are single IEEE operations on a number per
channel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.edge_client import float_errors as floats
from fedmpq.edge_client import update
from fedmpq.edge_client.arena import Arena
from fedmpq.edge_client.engine import Batch, EngineError, EpochResult, TrainingError
from fedmpq.edge_client.native_plan import (
    MoveUnit,
    ProductUnit,
    Quantizer,
    SumUnit,
    kept_for_backward,
    units_of,
)
from fedmpq.kernels import training as native
from fedmpq.kernels.training import Conv, Counter, MomentumBuffer, Rescale, StoredCodes
from fedmpq.model.activations import MIN_CLIP, CodeFormat
from fedmpq.model.exchange import TrainingPlan
from fedmpq.model.graph import INPUT, AvgPool, BatchNorm, Conv2d, Flatten, GlobalAvgPool, Graph, MaxPool
from fedmpq.model.integer_program import check_state
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws, Purpose

Vector = NDArray[np.float32]
Errors = NDArray[np.uint16]
_LEAST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Tensor:
    """A batch of codes between units; `shape` is (channels, height, width), channels are stored last."""

    codes: StoredCodes
    form: CodeFormat
    images: int
    shape: tuple[int, int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass
class _Layer:
    """One layer during a round."""

    quantized: QuantizedLayer
    scale: Vector
    """Of the integer weights, one per output channel; steps do not move during a round."""
    momentum: MomentumBuffer
    rate: Vector
    pull: Vector | None = None
    _integers: NDArray[np.int8] | None = None

    def integer_weights(self) -> NDArray[np.int8]:
        """The codes as the kernels multiply them, made once a step."""
        if self._integers is None:
            self._integers = self.quantized.integer_weights()
        return self._integers

    def codes_moved(self) -> None:
        self._integers = None


@dataclass(frozen=True)
class _Forward:
    """What a product's backward pass needs beside its input's codes."""

    conv: Conv
    rescale: Rescale
    norm: Vector
    """The normalized value is `acc * norm + bias`."""
    bias: Vector
    gain: Vector
    """Error of the accumulator in units of the integer weights, per error of BatchNorm's input."""


@dataclass
class _Step:
    """One training step under way."""

    number: int
    values: dict[str, Tensor]
    forwards: dict[str, _Forward] = field(default_factory=dict)
    states: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=dict)


class NativeEngine:
    """Trains with the C++ kernels; see `Engine`. `threads` share the images of a batch.

    `float_errors` leaves errors as they are instead of rounding them to 8 bits, to measure what that costs.
    It is slow, and its codes are not the same to the bit on every machine (module `float_errors`).
    """

    def __init__(self, threads: int | None = None, float_errors: bool = False) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads = {threads}: the native engine needs at least one")
        self.threads = min(threads or _cores(), native.MAX_THREADS)
        self._float_errors = float_errors
        self._arena = Arena()

    def load(self, graph: Graph, layers: Layers, side: Side, plan: TrainingPlan, draws: Draws) -> None:
        check_state(graph, layers, side)
        self._graph = graph
        self._units = units_of(graph)
        self._kept = kept_for_backward(self._units)
        self._last_use = {name: unit.output for unit in self._units for name in unit.sources}
        self._plan = plan
        self._draws = draws
        self._layers = {name: _trained(layer, plan) for name, layer in layers.items()}
        self._side = {name: tensor.astype(np.float32, copy=True) for name, tensor in side.items()}
        self._side_momentum: dict[str, Vector] = {}
        self._step_number = 0

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        strength = self._plan.learning_rate * self._plan.lasso / sum(self._graph.layer_sizes)
        for layer in self._layers.values():
            _refresh_lasso(layer, strength)
        samples, loss_sum, right_sum = 0, 0.0, 0
        for images, labels in batches:
            self._check_batch(images, labels)
            # What overflows float32 is found and named where it happens.
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                loss, right = self._train_step(images, labels)
            samples += len(labels)
            loss_sum += loss * len(labels)
            right_sum += right
        return EpochResult(samples, loss_sum / max(1, samples), right_sum / max(1, samples))

    def layers(self) -> Layers:
        return {
            name: replace(layer.quantized, codes=layer.quantized.codes.copy())
            for name, layer in self._layers.items()
        }

    def side(self) -> Side:
        return {name: tensor.copy() for name, tensor in self._side.items()}

    def _check_batch(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        """Nothing that a kernel could stumble over may reach one."""
        channels, height, width = self._graph.input.shape
        expected, classes = (height, width, channels), self._graph.shapes[self._graph.output][0]
        if images.dtype != np.uint8 or images.shape[1:] != expected or not len(images):
            raise TrainingError(
                f"a batch of images is {images.dtype} of shape {images.shape}, the model takes uint8 of"
                f" (images, {height}, {width}, {channels}) and at least one image"
            )
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise TrainingError(
                f"the labels of {len(images)} images are {labels.dtype} of shape {labels.shape};"
                " they must be int64, one each"
            )
        if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise TrainingError(
                f"labels run from {labels.min()} to {labels.max()}, the model's classes end at {classes - 1};"
                " number the labels as the model's classes are"
            )

    def _train_step(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[float, int]:
        self._arena.begin_step()
        image = self._graph.input
        codes = StoredCodes(np.ascontiguousarray(images).reshape(-1), False, image.zero_point)
        form = CodeFormat.image(image.scale, image.zero_point)
        step = _Step(self._step_number, {INPUT: Tensor(codes, form, len(images), _three(image.shape))})
        loss, right = 0.0, 0
        for unit in self._units:
            if isinstance(unit, ProductUnit):
                if unit.quantizer is None:
                    loss, right = self._logits(unit, step, labels)
                else:
                    step.values[unit.output] = self._product(unit, unit.quantizer, step)
            elif isinstance(unit, SumUnit):
                step.values[unit.output] = self._sum(unit, step)
            else:
                step.values[unit.output] = self._move(unit, step)
            self._drop_used(unit.sources, unit.output, step)
        for unit in reversed(self._units):
            if isinstance(unit, ProductUnit) and unit.quantizer is not None:
                self._product_backward(unit, unit.quantizer, step)
            elif isinstance(unit, SumUnit):
                self._sum_backward(unit, step)
            elif isinstance(unit, MoveUnit):
                self._move_backward(unit, step)
            step.values.pop(unit.output, None)
        self._step_number += 1
        return loss, right

    # Products ---------------------------------------------------------------------------------------------

    def _product(self, unit: ProductUnit, quantizer: Quantizer, step: _Step) -> Tensor:
        source, layer = step.values[unit.source], self._layers[unit.node.name]
        conv = self._conv_of(unit, source)
        acc = self._arena.take(conv.images * conv.outputs, np.int32)
        weights, wanted = layer.integer_weights(), unit.norm is not None
        sums = native.conv_forward(conv, source.codes, weights, self.threads, acc, statistics=wanted)
        target = self._format(quantizer)
        forward = self._normalized(unit, conv, sums, source.form, layer, target)
        rescale = forward.rescale
        for vector in (rescale.scale, rescale.shift):
            self._require_finite(f"the scale of layer {unit.node.name!r}", vector)
        channels, height, width = conv.out_channels, conv.out_height, conv.out_width
        out = self._new_codes(conv.images, conv.outputs, target)
        native.requantize(acc, conv.images, conv.pixels, channels, rescale, out.pairs, self.threads, out.data)
        step.forwards[unit.output] = forward
        return Tensor(out, target, conv.images, (channels, height, width))

    def _normalized(
        self,
        unit: ProductUnit,
        conv: Conv,
        sums: NDArray[np.float64],
        form: CodeFormat,
        layer: _Layer,
        target: CodeFormat,
    ) -> _Forward:
        """BatchNorm by the batch's statistics and the rounding, as one affine map of the accumulator.

        With `s` the accumulator's scale: normalized value `(acc - mean) * s * r`,
        `r = 1/sqrt(s^2 var + eps)`, and `t = (gamma * normalized + beta) / target scale`.
        """
        weight_scale = layer.scale.astype(np.float64)
        scale = weight_scale * float(form.scale)
        offset = (
            self._side[f"{unit.node.name}.bias"].astype(np.float64) if unit.op.bias else np.zeros(len(scale))
        )
        if unit.norm is None:
            t_scale, t_shift = scale / float(target.scale), offset / float(target.scale)
            flat = np.zeros(len(scale), np.float32)
            return _Forward(
                conv, _rescale(t_scale, t_shift, target), flat, flat, weight_scale.astype(np.float32)
            )
        assert isinstance(unit.norm.op, BatchNorm)
        count = conv.images * conv.pixels
        mean = sums[0] / count
        variance = np.maximum(sums[1] / count - mean * mean, 0.0) * scale * scale
        self._track(unit.norm.name, unit.norm.op, mean * scale + offset, variance, count)
        gamma = self._side[f"{unit.norm.name}.weight"].astype(np.float64)
        beta = self._side[f"{unit.norm.name}.bias"].astype(np.float64)
        inverse = 1.0 / np.sqrt(variance + unit.norm.op.eps)
        norm, bias = scale * inverse, -mean * scale * inverse
        rescale = _rescale(
            gamma * norm / float(target.scale), (gamma * bias + beta) / float(target.scale), target
        )
        gain = (gamma * inverse * weight_scale).astype(np.float32)
        return _Forward(conv, rescale, norm.astype(np.float32), bias.astype(np.float32), gain)

    def _track(
        self, name: str, op: BatchNorm, mean: NDArray[np.float64], variance: NDArray[np.float64], count: int
    ) -> None:
        """Running statistics, the variance unbiased, as torch keeps them."""
        unbiased = variance * (count / max(1, count - 1))
        for part, value in (("running_mean", mean), ("running_var", unbiased)):
            held = self._side[f"{name}.{part}"]
            held += np.float32(op.momentum) * (value.astype(np.float32) - held)
            self._require_finite(f"the side tensor '{name}.{part}'", held)

    def _product_backward(self, unit: ProductUnit, quantizer: Quantizer, step: _Step) -> None:
        forward, error = step.forwards.pop(unit.output), step.errors.pop(unit.output)
        conv, source, layer = forward.conv, step.values[unit.source], self._layers[unit.node.name]
        acc = self._arena.take(conv.images * conv.outputs, np.int32)
        maps = forward.rescale, forward.norm, forward.bias
        weights = layer.integer_weights()
        sums = native.conv_backward_sums(conv, source.codes, weights, error, *maps, self.threads, acc)
        self._require_finite(f"the error of layer {unit.node.name!r}", sums)
        self._update_clip(quantizer, math.fsum(sums[2]), math.fsum(sums[3]))
        mean_g, mean_gx = np.zeros((2, conv.out_channels), np.float32)
        if unit.norm is not None:
            count = conv.images * conv.pixels
            mean_g, mean_gx = (sums[0] / count).astype(np.float32), (sums[1] / count).astype(np.float32)
            self._update_side(f"{unit.norm.name}.weight", sums[1].astype(np.float32))
            self._update_side(f"{unit.norm.name}.bias", sums[0].astype(np.float32))
        if unit.op.bias:
            # A bias in front of BatchNorm changes nothing, so its gradient is zero.
            gradient = (
                sums[0].astype(np.float32) if unit.norm is None else np.zeros(conv.out_channels, np.float32)
            )
            self._update_side(f"{unit.node.name}.bias", gradient)
        greatest = native.backward_error(
            acc,
            error,
            conv.images,
            conv.pixels,
            conv.out_channels,
            *maps,
            forward.gain,
            mean_g,
            mean_gx,
            self.threads,
        )
        del acc
        self._require_finite(f"the error of layer {unit.node.name!r}", greatest)
        if self._float_errors:
            self._learn_in_floats(unit, conv, error, step)
            return
        rounded, scale = self._rounded(unit, conv, error, greatest, step)
        del error
        self._learn(unit, conv, rounded, scale, step)

    def _logits(self, unit: ProductUnit, step: _Step, labels: NDArray[np.int64]) -> tuple[float, int]:
        """The last layer, the loss, and the layer's own backward pass."""
        source, layer = step.values[unit.source], self._layers[unit.node.name]
        conv = self._conv_of(unit, source)
        acc = self._arena.take(conv.images * conv.outputs, np.int32)
        native.conv_forward(conv, source.codes, layer.integer_weights(), self.threads, acc)
        classes = conv.out_channels
        bias = self._side[f"{unit.node.name}.bias"] if unit.op.bias else np.zeros(classes, np.float32)
        scale = layer.scale * source.form.scale
        self._require_finite(f"the scale of layer {unit.node.name!r}", scale)
        loss, right, gradient = native.softmax_loss(
            acc, conv.images, classes, scale, bias, np.ascontiguousarray(labels)
        )
        del acc
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        if unit.op.bias:
            self._update_side(f"{unit.node.name}.bias", reduce(np.add, gradient))
        error = self._arena.take((gradient.size,), np.uint16)
        greatest = native.halve_errors(gradient, layer.scale, error)
        self._require_finite(f"the error of layer {unit.node.name!r}", greatest)
        if self._float_errors:
            self._learn_in_floats(unit, conv, error, step)
        else:
            self._learn(unit, conv, *self._rounded(unit, conv, error, greatest, step), step)
        return loss, right

    def _rounded(
        self, unit: ProductUnit, conv: Conv, error: Errors, greatest: float, step: _Step
    ) -> tuple[NDArray[np.int8], np.float32]:
        """Errors as 8-bit integers and their scale, stochastically rounded.

        They come in units of the integer weights, `e * s_w`: per-channel steps need no more than one scale.
        """
        scale = np.float32(greatest) / np.float32(127)
        # Errors so small that the scale is denormal would have an infinite inverse; they count as nothing.
        inverse = np.float32(1) / scale if scale >= _LEAST_NORMAL else np.float32(0)
        rounded = self._arena.take(conv.images * conv.outputs, np.int8)
        native.quantize_error(
            error,
            conv.images,
            conv.outputs,
            float(inverse),
            self._counter(unit, step),
            Purpose.ERROR,
            self.threads,
            rounded,
        )
        return rounded, scale

    def _learn(
        self, unit: ProductUnit, conv: Conv, rounded: NDArray[np.int8], scale: np.float32, step: _Step
    ) -> None:
        """Pass the errors to the input and update the codes."""
        source, layer = step.values[unit.source], self._layers[unit.node.name]
        weights = layer.integer_weights()
        if unit.source != INPUT:
            known = unit.source in step.errors
            if not known:
                step.errors[unit.source] = self._arena.take((conv.images * conv.inputs,), np.uint16)
            native.conv_backward_input(
                conv, rounded, weights, float(scale), known, self.threads, step.errors[unit.source]
            )
        gradient = np.empty(weights.size, np.float32)
        scales = np.asarray(scale * source.form.scale / layer.scale, dtype=np.float32)
        native.conv_backward_weights(conv, source.codes, rounded, scales, self.threads, gradient)
        self._update_codes(unit, gradient, step)

    def _learn_in_floats(self, unit: ProductUnit, conv: Conv, error: Errors, step: _Step) -> None:
        """The same from errors as they are, in units of the integer weights."""
        source, layer = step.values[unit.source], self._layers[unit.node.name]
        errors, weights = floats.widened(error), layer.integer_weights().astype(np.float32)
        if unit.source != INPUT:
            passed = floats.input_gradient(conv, weights, errors).reshape(-1)
            if unit.source in step.errors:
                passed = passed + floats.widened(step.errors[unit.source])
            step.errors[unit.source] = floats.halved(passed)
        codes = _unpaired(source).astype(np.float32) - np.float32(source.codes.zero)
        images = codes.reshape(conv.images, conv.height, conv.width, conv.channels)
        gradient = floats.weight_gradient(conv, images, errors).reshape(conv.out_channels, -1)
        gradient *= (source.form.scale / layer.scale)[:, None]
        self._update_codes(unit, gradient.reshape(-1), step)

    def _update_codes(self, unit: ProductUnit, gradient: Vector, step: _Step) -> None:
        layer = self._layers[unit.node.name]
        finite = native.update_codes(
            layer.quantized.codes.reshape(-1),
            gradient,
            bits=layer.quantized.bits,
            paper=self._plan.update == "paper",
            step=layer.quantized.step.reshape(-1),
            rate=layer.rate,
            weight_decay=self._plan.weight_decay,
            momentum=self._plan.momentum,
            buffer=layer.momentum,
            pull=layer.pull,
            counter=self._counter(unit, step),
        )
        layer.codes_moved()
        if not finite:
            raise self._diverged(f"the gradient of layer {unit.node.name!r} is not finite")

    def _counter(self, unit: ProductUnit, step: _Step) -> Counter:
        return Counter(self._draws.seed, self._draws.client, self._draws.round, unit.index, step.number)

    def _conv_of(self, unit: ProductUnit, source: Tensor) -> Conv:
        op = unit.op
        if not isinstance(op, Conv2d):
            return _window(source, (1, 1), (1, 1), (0, 0), out_channels=op.out_features)
        return _window(source, op.kernel, op.stride, op.padding, op.dilation, op.out_channels, op.groups)

    # Sums, pools and Flatten ------------------------------------------------------------------------------

    def _sum(self, unit: SumUnit, step: _Step) -> Tensor:
        left, target = step.values[unit.sources[0]], self._format(unit.quantizer)
        if len(unit.sources) == 2:
            right, scales = step.values[unit.sources[1]], (left.form.scale, target.scale)
            right_scale = float(right.form.scale)
        else:
            # Codes alone are a sum with nothing, and the integer program multiplies them by one quotient.
            right, scales, right_scale = left, (left.form.scale / target.scale, np.float32(1)), 0.0
        widest = np.float32(max(float(scales[0]), right_scale)) / scales[1]
        self._require_finite(f"the scale of {unit.output!r}", float(widest))
        out = self._new_codes(left.images, left.elements, target)
        states = self._arena.take((left.images * -(-left.elements // 4),), np.uint8)
        native.add(
            left.codes,
            float(scales[0]),
            right.codes,
            right_scale,
            left.images,
            left.elements,
            float(scales[1]),
            target.low,
            target.high,
            out.pairs,
            self.threads,
            out.data,
            states,
        )
        step.states[unit.output] = states
        return Tensor(out, target, left.images, left.shape)

    def _sum_backward(self, unit: SumUnit, step: _Step) -> None:
        error, states = step.errors.pop(unit.output), step.states.pop(unit.output)
        images = len(error) // self._elements(unit.sources[0])
        above, below = native.pass_error(states, images, len(error) // images, self.threads, error)
        del states
        self._update_clip(unit.quantizer, above, below)
        if len(unit.sources) == 2:
            twin = self._arena.take(error.shape, np.uint16)
            np.copyto(twin, error)
            self._deliver(unit.sources[1], twin, step)
        self._deliver(unit.sources[0], error, step)

    def _move(self, unit: MoveUnit, step: _Step) -> Tensor:
        source = step.values[unit.sources[0]]
        if isinstance(unit.op, Flatten):
            return self._flatten(source)
        pool = self._pool_of(unit.op, source)
        shape = pool.out_channels, pool.out_height, pool.out_width
        if isinstance(unit.op, MaxPool):
            out = self._new_codes(pool.images, pool.outputs, source.form)
            native.max_pool(pool, source.codes, self.threads, out.data)
            return Tensor(out, source.form, pool.images, shape)
        target = source.form.averaged()
        out = self._new_codes(pool.images, pool.outputs, target)
        multiplier = source.form.averaging(pool.kernel_h * pool.kernel_w)
        native.average_pool(
            pool, source.codes, float(multiplier), target.low, target.high, self.threads, out.data
        )
        return Tensor(out, target, pool.images, shape)

    def _move_backward(self, unit: MoveUnit, step: _Step) -> None:
        error, name = step.errors.pop(unit.output), unit.sources[0]
        if name == INPUT:
            return
        images = len(error) // self._elements(unit.output)
        if isinstance(unit.op, Flatten):
            self._deliver(name, self._unflatten(error, images, name), step)
            return
        source = step.values.get(name)
        pool = self._pool_of(unit.op, source or self._described(name, images))
        out = self._arena.take((pool.images * pool.inputs,), np.uint16)
        if isinstance(unit.op, MaxPool):
            assert source is not None
            native.max_pool_backward(pool, source.codes, error, self.threads, out)
        else:
            native.average_pool_backward(pool, error, self.threads, out)
        self._deliver(name, out, step)

    def _flatten(self, source: Tensor) -> Tensor:
        """Channels, then rows, then columns: a new order unless there is one pixel."""
        channels, height, width = source.shape
        out = self._arena.take(source.codes.data.shape, np.uint8)
        if height * width == 1:
            np.copyto(out, source.codes.data)
        else:
            codes = _unpaired(source).reshape(source.images, height, width, channels).transpose(0, 3, 1, 2)
            out[:] = _paired(codes.reshape(source.images, -1), source.codes.pairs)
        return Tensor(replace(source.codes, data=out), source.form, source.images, (source.elements, 1, 1))

    def _unflatten(self, error: Errors, images: int, name: str) -> Errors:
        shape = self._graph.shapes[name]
        if len(shape) == 1:
            return error
        turned = error.reshape(images, *shape).transpose(0, 2, 3, 1)
        out = self._arena.take(error.shape, np.uint16)
        np.copyto(out.reshape(turned.shape), turned)
        return out

    def _pool_of(self, op: MaxPool | AvgPool | GlobalAvgPool, source: Tensor) -> Conv:
        if isinstance(op, GlobalAvgPool):
            kernel = source.shape[1:]
            return _window(source, kernel, kernel, (0, 0))
        return _window(source, op.kernel, op.stride, op.padding)

    # Bookkeeping ------------------------------------------------------------------------------------------

    def _deliver(self, name: str, error: Errors, step: _Step) -> None:
        """An error for the value `name`, added to what has come for it before; the array passes over."""
        if name in step.errors:
            native.add_errors(error, step.errors[name])
        elif name != INPUT:
            step.errors[name] = error

    def _drop_used(self, sources: tuple[str, ...], reader: str, step: _Step) -> None:
        """Forget codes that neither a later unit nor the backward pass reads."""
        for name in set(sources):
            if name != INPUT and name not in self._kept and self._last_use[name] == reader:
                del step.values[name]

    def _new_codes(self, images: int, elements: int, form: CodeFormat) -> StoredCodes:
        pairs = form.high - form.low <= 15
        data = self._arena.take((StoredCodes.nbytes(images, elements, pairs),), np.uint8)
        return StoredCodes(data, pairs, -form.low)

    def _format(self, quantizer: Quantizer) -> CodeFormat:
        clip = np.float32(self._side[f"{quantizer.name}.clip"])
        return CodeFormat.quantized(clip, quantizer.maximum, quantizer.op.bits, quantizer.op.signed)

    def _elements(self, name: str) -> int:
        return math.prod(self._graph.shapes[name])

    def _described(self, name: str, images: int) -> Tensor:
        """A tensor whose codes are gone, for its shape."""
        empty = StoredCodes(np.zeros(0, np.uint8), False, 0)
        return Tensor(empty, CodeFormat(np.float32(1), 0, 255), images, _three(self._graph.shapes[name]))

    def _update_clip(self, quantizer: Quantizer, above: float, below: float) -> None:
        name = f"{quantizer.name}.clip"
        gradient = above - below if quantizer.op.signed else above
        if 0 < quantizer.maximum <= self._side[name]:
            gradient = 0.0  # a ReLU6 bounds the range, not the clip
        self._update_side(name, np.asarray(gradient, dtype=np.float32))
        np.maximum(self._side[name], MIN_CLIP, out=self._side[name])

    def _update_side(self, name: str, gradient: Vector) -> None:
        """SGD with momentum and coupled weight decay."""
        tensor = self._side[name]
        direction = gradient + np.float32(self._plan.weight_decay) * tensor
        if self._plan.momentum:
            held = self._side_momentum.get(name)
            direction = direction if held is None else held * np.float32(self._plan.momentum) + direction
            self._side_momentum[name] = direction
        self._require_finite(f"the gradient of {name!r}", direction)
        tensor -= np.float32(self._plan.learning_rate) * direction
        self._require_finite(f"the side tensor {name!r}", tensor)

    def _require_finite(self, what: str, values: NDArray[np.floating[Any]] | float) -> None:
        # A sum of finite numbers may overflow, so only one that is not finite is worth a closer look.
        if not math.isfinite(np.add.reduce(values, axis=None)) and not np.isfinite(values).all():
            raise self._diverged(f"{what} is not finite")

    def _diverged(self, what: str) -> TrainingError:
        rate = self._plan.learning_rate
        return TrainingError(
            f"{what} in training step {self._step_number}; lower the learning rate (now {rate})"
        )


def _trained(layer: QuantizedLayer, plan: TrainingPlan) -> _Layer:
    step = layer.step.reshape(-1)
    rate = (
        np.float32(plan.learning_rate) * step
        if plan.update == "paper"
        else np.float32(plan.code_learning_rate) / step
    )
    bits = plan.momentum_bits if plan.momentum else 0
    own = replace(layer, codes=np.array(layer.codes, order="C"))
    scale = np.array(np.broadcast_to(layer.integer_scale(), (len(layer.codes),)), dtype=np.float32)
    momentum = MomentumBuffer.zeros(layer.codes.size, bits)
    return _Layer(own, scale, momentum, np.asarray(rate, dtype=np.float32))


def _refresh_lasso(layer: _Layer, strength: float) -> None:
    """The Lasso's table from the planes as they are at the start of an epoch."""
    if strength > 0:
        codes = layer.quantized.codes.reshape(-1)
        pull = update.lasso_pull(codes, layer.quantized.bits, strength * codes.size)
        layer.pull = pull if pull.any() else None


def _rescale(scale: NDArray[np.float64], shift: NDArray[np.float64], target: CodeFormat) -> Rescale:
    return Rescale(scale.astype(np.float32), shift.astype(np.float32), target.low, target.high)


def _window(
    source: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...] = (1, 1),
    out_channels: int | None = None,
    groups: int = 1,
) -> Conv:
    channels, height, width = source.shape
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [
        (size + 2 * p - span) // s + 1
        for size, p, span, s in zip((height, width), padding, spans, stride, strict=True)
    ]
    outputs = channels if out_channels is None else out_channels
    return Conv(
        source.images, height, width, channels, *sizes, outputs, *kernel, *stride, *padding, *dilation, groups
    )


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return (shape[0], 1, 1) if len(shape) == 1 else (shape[0], shape[1], shape[2])


def _unpaired(source: Tensor) -> NDArray[np.uint8]:
    rows = source.codes.data.reshape(source.images, -1)
    if not source.codes.pairs:
        return rows
    return np.stack((rows & 15, rows >> 4), axis=2).reshape(source.images, -1)[:, : source.elements]


def _paired(codes: NDArray[np.uint8], pairs: bool) -> NDArray[np.uint8]:
    if not pairs:
        return codes.reshape(-1)
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return np.asarray(padded[:, 0::2] | (padded[:, 1::2] << 4), dtype=np.uint8).reshape(-1)


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
