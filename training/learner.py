"""What a layer does with the errors of its accumulators: it passes them on, and updates its codes.

Errors come in units of the integer weights, `e * s_w`: so per-channel steps need no more than one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import Protocol

import numpy as np

from fedmpq.kernels import bound, bound_maps
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer, Memory
from fedmpq.kernels.program import Action
from fedmpq.kernels.tensors import Conv
from fedmpq.model.grid import integer_weights
from fedmpq.model.randomness import Purpose
from fedmpq.training import float_errors as floats
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding
from fedmpq.training.native_plan import ProductUnit


class Learner:
    """The last part of a layer's backward pass, bound; its arrays are used only once they have places."""

    def __init__(
        self,
        unit: ProductUnit,
        conv: Conv,
        error: Buffer,
        greatest: Memory,
        images: int,
        binding: Binding,
    ) -> None:
        """`greatest` has the greatest magnitude of the errors of each of so many images."""
        frozen, layer = unit.node.frozen, binding.layers[unit.node.name]
        self.gradient = binding.layout.buffer(0 if frozen else conv.weights, np.float32)
        scales = ErrorScales(unit, conv, greatest, images, binding)
        self._measure = scales.call
        products: type[_Products] = _FloatProducts if binding.float_errors else _IntegerProducts
        self._products = products(unit, conv, error, scales, self.gradient, binding)
        self.update: Call | None = None
        if not frozen:
            self.update = binding.bind(
                bound.update_codes(layer.update, binding.step, binding.threads, self.gradient, layer.codes),
                f"the gradient of layer {unit.node.name!r}",
            )

    @property
    def actions(self) -> Sequence[Action]:
        update = () if self.update is None else (self.update,)
        return self._measure, *self._products.actions, *update


class ErrorScales:
    """The scales of errors as 8-bit numbers and of the gradient that they give, found by a bound call."""

    def __init__(
        self, unit: ProductUnit, conv: Conv, greatest: Memory, images: int, binding: Binding
    ) -> None:
        numbers = np.zeros(2, np.float32)
        self.scale, self.inverse = (
            c_float.from_buffer(numbers.data),
            c_float.from_buffer(numbers.data, numbers.itemsize),
        )
        self.of_gradient = binding.layout.buffer(conv.out_channels, np.float32)
        """By output channel."""
        source, layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        self.call = binding.bind(
            bound_maps.error_scales(
                greatest, images, source.number, layer.scale, conv.out_channels, numbers, self.of_gradient
            ),
            f"the error of layer {unit.node.name!r}",
        )


class _Products(Protocol):
    """The two products of a layer's errors: errors of its input, and the gradient of its weights."""

    def __init__(
        self,
        unit: ProductUnit,
        conv: Conv,
        error: Buffer,
        scales: ErrorScales,
        gradient: StepBuffer,
        binding: Binding,
    ) -> None: ...

    @property
    def actions(self) -> Sequence[Action]: ...


class _IntegerProducts:
    """Products of errors that are rounded to 8 bits stochastically."""

    def __init__(
        self,
        unit: ProductUnit,
        conv: Conv,
        error: Buffer,
        scales: ErrorScales,
        gradient: StepBuffer,
        binding: Binding,
    ) -> None:
        source, threads = binding.tensors[unit.source], binding.threads
        rounded = binding.layout.buffer(conv.images * conv.outputs, np.int8)
        calls = [
            bound.quantize_error(
                error,
                conv.images,
                conv.outputs,
                scales.inverse,
                binding.draws.counter(unit.index),
                Purpose.ERROR,
                threads,
                rounded,
                binding.step,
            )
        ]
        if unit.source not in binding.unlearnt:
            out, known = binding.error_of(unit.source, source)
            weights = binding.layers[unit.node.name].weights
            calls.append(bound.conv_backward_input(conv, rounded, weights, scales.scale, known, threads, out))
        if not unit.node.frozen:
            of_gradient = scales.of_gradient
            calls.append(
                bound.conv_backward_weights(conv, source.codes, rounded, of_gradient, threads, gradient)
            )
        self.actions = tuple(binding.bind(call) for call in calls)


class _FloatProducts:
    """Products of errors as they are (module `float_errors`)."""

    def __init__(
        self,
        unit: ProductUnit,
        conv: Conv,
        error: Buffer,
        scales: ErrorScales,
        gradient: StepBuffer,
        binding: Binding,
    ) -> None:
        self._conv, self._error, self._gradient = conv, error, gradient
        self._source, self._layer = binding.tensors[unit.source], binding.layers[unit.node.name]
        self._frozen = unit.node.frozen
        self._out: Buffer | None = None
        self._known = False
        if unit.source not in binding.unlearnt:
            self._out, self._known = binding.error_of(unit.source, self._source)
        out = () if self._out is None else (self._out,)
        binding.layout.use(error, self._source.buffer, gradient, *out)

        self.actions = (self._run,)

    def _run(self) -> None:
        conv, source = self._conv, self._source
        errors, layer = floats.widened(self._error.array), self._layer
        weights = integer_weights(layer.codes, layer.bits.value).astype(np.float32)
        if self._out is not None:
            passed = floats.input_gradient(conv, weights, errors).reshape(-1)
            if self._known:
                passed = passed + floats.widened(self._out.array)
            self._out.array[...] = floats.halved(passed)
        if self._frozen:
            return
        codes = source.unpaired().astype(np.float32) - np.float32(-source.low)
        images = codes.reshape(conv.images, conv.height, conv.width, conv.channels)
        gradient = floats.weight_gradient(conv, images, errors).reshape(conv.out_channels, -1)
        gradient *= (np.float32(source.scale) / self._layer.scale)[:, None]
        self._gradient.array[...] = gradient.reshape(-1)
