"""Layers in training: products forward and backward, BatchNorm and rounding between them, the loss."""

from __future__ import annotations

import math
from ctypes import c_float

import numpy as np

from fedmpq.kernels import bound
from fedmpq.kernels.tensors import Buffer, Conv, Counter
from fedmpq.model.activations import code_bounds
from fedmpq.model.graph import INPUT, Conv2d
from fedmpq.model.randomness import Purpose
from fedmpq.training import float_errors as floats
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Tensor, single
from fedmpq.training.native_plan import ProductUnit, Quantizer
from fedmpq.training.normalization import ChannelMap, NormMap, Scratch
from fedmpq.training.side_tensors import NotFinite, all_finite, clip_of

_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
# With so many products or more in each, it takes longer to compute accumulators again than to keep them.
_WORTH_KEEPING = 64


class Product:
    """A layer with its BatchNorm and its rounding.

    The backward pass computes accumulators again, unless there was room to keep them as 16-bit numbers.
    """

    def __init__(self, unit: ProductUnit, quantizer: Quantizer, binding: Binding) -> None:
        self._unit, self._quantizer = unit, quantizer
        self._source, self._layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        self._conv = conv = _conv_of(unit, self._source)
        shape = conv.out_channels, conv.out_height, conv.out_width
        self._target = binding.new_tensor(
            conv.images, shape, *code_bounds(quantizer.op.bits, quantizer.op.signed)
        )
        binding.tensors[unit.output] = self._target
        binding.sparing.add(unit.output)
        self._map = (ChannelMap if unit.norm is None else NormMap)(unit, conv, self._layer, binding.side)
        self._bind_forward(binding)

    def _bind_forward(self, binding: Binding) -> None:
        conv, layout, target = self._conv, binding.layout, self._target
        self._weights = layout.buffer(conv.weights, np.int8)
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        sums = None if self._unit.norm is None else binding.scratch.sums
        self._multiply = binding.bind(
            bound.conv_forward(conv, self._source.codes, self._weights, binding.threads, acc, sums)
        )
        self._bind_keeping(acc, binding)
        self._map.bind(binding.layout, binding.scratch, binding.statistics)
        self._rescale = self._map.rescale(target.low, target.high)
        self._requantize = binding.bind(
            bound.requantize(
                acc,
                conv.images,
                conv.pixels,
                conv.out_channels,
                self._rescale,
                target.pairs,
                binding.threads,
                target.buffer,
            )
        )

    def _bind_keeping(self, acc: Buffer, binding: Binding) -> None:
        conv = self._conv
        self._kept: StepBuffer | None = None
        if conv.weights // conv.out_channels >= _WORTH_KEEPING:
            self._kept = binding.layout.spare_buffer(conv.images * conv.outputs, np.int16)
            self._keep = binding.bind(bound.keep(acc, conv.images, conv.outputs, binding.threads, self._kept))

    def bind_backward(self, binding: Binding) -> None:
        conv, layout, threads = self._conv, binding.layout, binding.threads
        error = binding.errors.pop(self._unit.output)
        shared = any(other is error for other in binding.errors.values())
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        maps = self._rescale, self._map.norm, self._map.bias
        self._sum_up = binding.bind(
            bound.conv_backward_sums(
                conv, self._source.codes, self._weights, error, *maps, threads, acc, binding.scratch.sums
            )
        )
        if self._kept is not None:
            size = conv.images, conv.pixels, conv.out_channels
            self._sum_kept = binding.bind(
                bound.kept_backward_sums(self._kept, *size, error, *maps, threads, acc, binding.scratch.sums)
            )
        self._means = layout.buffer(2 * conv.out_channels, np.float32)
        self._greatest = layout.buffer(conv.images, np.float32)
        mean_g, mean_gx = self._means.split(2)
        turned = layout.buffer(error.count, np.uint16) if shared else error
        layout.use(binding.scratch.sums, binding.scratch.work, self._means)
        self._turn = binding.bind(
            bound.backward_error(
                acc,
                error,
                conv.images,
                conv.pixels,
                conv.out_channels,
                *maps,
                self._map.gain,
                mean_g,
                mean_gx,
                threads,
                turned,
                self._greatest,
            )
        )
        self._learner = _learner_of(self._unit, conv, self._weights, turned, binding)
        self._bind_side(binding)

    def _bind_side(self, binding: Binding) -> None:
        """Where the gradients of side tensors go. A bias before BatchNorm changes nothing: it has none."""
        side, norm = binding.side, self._unit.norm
        self._side_gradients = side.gradients
        self._clip = side.places[clip_of(self._quantizer)].start
        names = [f"{norm.name}.bias", f"{norm.name}.weight"] if norm is not None else []
        names += [f"{self._unit.node.name}.bias"] if norm is None and self._unit.op.bias else []
        self._learnt = [side.gradients[side.places[name]] for name in names]

    def settle(self, scratch: Scratch) -> None:
        self._map.settle(scratch)
        channels = self._conv.out_channels
        self._sums = scratch.sums.array[: 4 * channels]
        rows = scratch.sum_rows(channels)
        self._of_errors, self._above, self._below = rows[:2], rows[2], rows[3]
        self._pair = scratch.work_rows(channels)[:2]
        self._mean_rows = self._means.array.reshape(2, channels)
        self._gradients = list(zip(self._learnt, rows, strict=False))
        self._count = self._conv.images * self._conv.pixels
        self._has_room = self._kept is not None and self._kept.placed

    def forward(self) -> None:
        self._layer.integer_weights(self._weights.array)
        self._multiply()
        self._is_kept = self._has_room and self._keep() == 1
        self._map.compute(self._source.scale, self._target.scale)
        if not all_finite(self._map.t):
            raise NotFinite(f"the scale of layer {self._unit.node.name!r} is not finite")
        self._requantize()

    def backward(self) -> None:
        if self._is_kept:
            self._sum_kept()
        else:
            self._sum_up()
        if not all_finite(self._sums):
            raise NotFinite(f"the error of layer {self._unit.node.name!r} is not finite")
        self._differentiate_side()
        self._turn()
        self._learner.learn(float(np.maximum.reduce(self._greatest.array)))

    def _differentiate_side(self) -> None:
        """The gradients of side tensors from the sums over each channel, and BatchNorm's means."""
        clip = math.fsum(self._above.tolist())
        if self._quantizer.op.signed:
            clip -= math.fsum(self._below.tolist())
        self._side_gradients[self._clip] = clip
        for gradient, row in self._gradients:
            gradient[...] = row
        if self._unit.norm is None:
            self._mean_rows[...] = 0.0
        else:
            np.divide(self._of_errors, self._count, self._pair)
            self._mean_rows[...] = self._pair


class Logits:
    """The last layer, and the loss."""

    def __init__(self, unit: ProductUnit, binding: Binding) -> None:
        self._unit = unit
        self._source, self._layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        self._conv = conv = _conv_of(unit, self._source)
        layout, side, bias = binding.layout, binding.side, f"{unit.node.name}.bias"
        self._weights = layout.buffer(conv.weights, np.int8)
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        self._multiply = binding.bind(
            bound.conv_forward(conv, self._source.codes, self._weights, binding.threads, acc, None)
        )
        classes = conv.out_channels
        self._scale = layout.buffer(classes, np.float32)
        self._gradient = layout.buffer(conv.images * classes, np.float32)
        self._loss = layout.buffer(1, np.float64)
        offset = side.values[side.places[bias]] if unit.op.bias else np.zeros(classes, np.float32)
        self._bias_gradient = side.gradients[side.places[bias]] if unit.op.bias else None
        self._judge = binding.bind(
            bound.softmax_loss(
                acc,
                conv.images,
                classes,
                self._scale,
                offset,
                binding.labels,
                self._gradient,
                self._loss,
            )
        )

    def bind_backward(self, binding: Binding) -> None:
        conv = self._conv
        error = binding.layout.buffer(conv.images * conv.outputs, np.uint16)
        self._halve = binding.bind(
            bound.halve_errors(self._gradient, conv.images, conv.out_channels, self._layer.scale, error)
        )
        self._learner = _learner_of(self._unit, conv, self._weights, error, binding)

    def settle(self, scratch: Scratch) -> None:
        self._rows = self._gradient.array.reshape(self._conv.images, self._conv.out_channels)

    def forward(self) -> None:
        self._layer.integer_weights(self._weights.array)
        self._multiply()
        np.multiply(self._layer.scale, np.float32(self._source.scale), self._scale.array)
        if not all_finite(self._scale.array):
            raise NotFinite(f"the scale of layer {self._unit.node.name!r} is not finite")
        self.right = int(self._judge())
        self.loss = float(self._loss.array[0])
        if not math.isfinite(self.loss):
            raise NotFinite(f"the loss is {self.loss}")

    def backward(self) -> None:
        if self._bias_gradient is not None:
            # One image after the other: a sum in another order is another number.
            self._bias_gradient[...] = np.add.accumulate(self._rows)[-1]
        self._learner.learn(float(self._halve()))


class _Learner:
    """What a layer does with the errors of its accumulators: it passes them on, and updates its codes.

    They come in units of the integer weights, `e * s_w`: per-channel steps need no more than one scale. Here
    they are rounded to 8 bits stochastically.
    """

    def __init__(
        self, unit: ProductUnit, conv: Conv, weights: StepBuffer, error: Buffer, binding: Binding
    ) -> None:
        self._unit, self._conv, self._weights, self._error = unit, conv, weights, error
        self._source, self._layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        self._step = binding.step
        self._scales = binding.layout.buffer(conv.out_channels, np.float32)
        self._gradient = binding.layout.buffer(conv.weights, np.float32)
        self._bind(binding)
        self._update = binding.bind(bound.update_codes(self._layer.update, self._gradient, self._layer.codes))

    def learn(self, greatest: float) -> None:
        """`greatest` is the greatest magnitude of the errors."""
        if not math.isfinite(greatest):
            raise NotFinite(f"the error of layer {self._unit.node.name!r} is not finite")
        self._propagate(greatest)
        self._layer.update.step_number = self._step.value
        if self._update() != 0:
            raise NotFinite(f"the gradient of layer {self._unit.node.name!r} is not finite")

    def _bind(self, binding: Binding) -> None:
        conv, threads, draws = self._conv, binding.threads, binding.draws
        self._scale, self._inverse = c_float(), c_float()
        counter = Counter(draws.seed, draws.client, draws.round, self._unit.index, 0)
        rounded = binding.layout.buffer(conv.images * conv.outputs, np.int8)
        self._round = binding.bind(
            bound.quantize_error(
                self._error,
                conv.images,
                conv.outputs,
                self._inverse,
                counter,
                Purpose.ERROR,
                threads,
                rounded,
                binding.step,
            )
        )
        self._pass_on = None
        if self._unit.source != INPUT:
            out, known = binding.error_of(self._unit.source, self._source)
            self._pass_on = binding.bind(
                bound.conv_backward_input(conv, rounded, self._weights, self._scale, known, threads, out)
            )
        self._differentiate = binding.bind(
            bound.conv_backward_weights(
                conv, self._source.codes, rounded, self._scales, threads, self._gradient
            )
        )

    def _propagate(self, greatest: float) -> None:
        """Errors to the input, and the gradient of the weights."""
        self._scale.value = greatest / 127
        scale = self._scale.value
        # Errors so small that the scale is denormal would have an infinite inverse; they count as nothing.
        self._inverse.value = 1 / scale if scale >= _LEAST_NORMAL else 0.0
        self._round()
        if self._pass_on is not None:
            self._pass_on()
        np.divide(single(scale * self._source.scale), self._layer.scale, self._scales.array)
        self._differentiate()


class _FloatLearner(_Learner):
    """The same from errors as they are."""

    def _bind(self, binding: Binding) -> None:
        self._out, self._known = None, False
        if self._unit.source != INPUT:
            self._out, self._known = binding.error_of(self._unit.source, self._source)
        out = () if self._out is None else (self._out,)
        used = self._error, self._weights, self._source.buffer, self._scales, self._gradient
        binding.layout.use(*used, *out)

    def _propagate(self, greatest: float) -> None:
        conv, source = self._conv, self._source
        errors, weights = floats.widened(self._error.array), self._weights.array.astype(np.float32)
        if self._out is not None:
            passed = floats.input_gradient(conv, weights, errors).reshape(-1)
            if self._known:
                passed = passed + floats.widened(self._out.array)
            self._out.array[...] = floats.halved(passed)
        codes = source.unpaired().astype(np.float32) - np.float32(-source.low)
        images = codes.reshape(conv.images, conv.height, conv.width, conv.channels)
        gradient = floats.weight_gradient(conv, images, errors).reshape(conv.out_channels, -1)
        gradient *= (np.float32(source.scale) / self._layer.scale)[:, None]
        self._gradient.array[...] = gradient.reshape(-1)


def _learner_of(
    unit: ProductUnit, conv: Conv, weights: StepBuffer, error: Buffer, binding: Binding
) -> _Learner:
    return (_FloatLearner if binding.float_errors else _Learner)(unit, conv, weights, error, binding)


def _conv_of(unit: ProductUnit, source: Tensor) -> Conv:
    op = unit.op
    if not isinstance(op, Conv2d):
        return Conv.over(source.images, source.shape, out_channels=op.out_features)
    window = op.kernel, op.stride, op.padding, op.dilation, op.out_channels, op.groups
    return Conv.over(source.images, source.shape, *window)
