"""Kernels bound to their arguments: types and sizes are checked once, the call can be made again and again.

Arguments that change from call to call are ctypes numbers (`c_float`, `c_uint32`), whose value is read when
the call is made, as is the place of a `Buffer`. `include/fedmpq/training.h` states what is computed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint32, c_void_p
from functools import partial
from typing import Any

import numpy as np

from fedmpq.kernels.library import library
from fedmpq.kernels.tensors import (
    Buffer,
    CodeUpdate,
    Conv,
    Counter,
    Memory,
    Rescale,
    StoredCodes,
    pointer,
)

Number = float | c_float


class Call:
    """A kernel and its arguments; to call it gives what the kernel returns."""

    __slots__ = ("_kept", "_run", "buffers")

    def __init__(self, function: Any, arguments: tuple[Any, ...], memory: tuple[Memory | None, ...]) -> None:
        self._run = partial(function, *arguments)
        self._kept = memory
        self.buffers = tuple(each for each in memory if isinstance(each, Buffer))

    def __call__(self) -> Any:
        return self._run()


class CheckedCall(Call):
    """Of a kernel that returns 0, or why it could not run, which is raised."""

    __slots__ = ()

    def __call__(self) -> None:
        status = self._run()
        if status == -1:
            raise MemoryError(
                "not enough memory for the scratch buffers of a training kernel; use a smaller batch"
            )
        if status != 0:
            raise ValueError(
                "an image is too large for the training kernels' 32-bit sums; use smaller images"
            )


class Operand(ctypes.Structure):
    """`FedmpqCodes`: one side of an addition; its real values are `scale * code`."""

    _fields_ = [("data", c_void_p), ("pairs", c_int32), ("zero", c_int32), ("scale", c_float)]


class Addition(CheckedCall):
    """Of `left` and `right`, whose scales are to be set before it is called."""

    __slots__ = ("_places", "left", "right")

    def __init__(
        self,
        left: tuple[c_void_p, bool, int],
        right: tuple[c_void_p, bool, int],
        arguments: tuple[Any, ...],
        memory: tuple[Memory | None, ...],
    ) -> None:
        self.left, self.right = Operand(*left), Operand(*right)
        self._places = left[0], right[0]
        operands = ctypes.byref(self.left), ctypes.byref(self.right)
        super().__init__(library.fedmpq_add, (*operands, *arguments), memory)

    def __call__(self) -> None:
        # A structure holds the address that its buffer had when it was made.
        self.left.data, self.right.data = self._places
        super().__call__()


def conv_forward(
    conv: Conv, codes: StoredCodes, weights: Memory, threads: int, acc: Memory, sums: Memory | None
) -> Call:
    """Accumulators into `acc` and, if wanted, each channel's sum and sum of squares into `sums`."""
    arguments = (
        ctypes.byref(conv),
        *_codes(codes, conv.images, conv.inputs),
        pointer(weights, np.int8, conv.weights),
        threads,
        pointer(acc, np.int32, conv.images * conv.outputs),
        None if sums is None else pointer(sums, np.float64, 2 * conv.out_channels),
    )
    return CheckedCall(library.fedmpq_conv_forward, arguments, (codes.data, weights, acc, sums))


def conv_backward_sums(
    conv: Conv,
    codes: StoredCodes,
    weights: Memory,
    error: Memory,
    rescale: Rescale,
    norm: Memory,
    bias: Memory,
    threads: int,
    acc: Memory,
    sums: Memory,
) -> Call:
    """Accumulators again into `acc`, and into `sums`, by channel: the sum of errors passed, of those times
    the normalized value, and of errors clipped above and below."""
    arguments = (
        ctypes.byref(conv),
        *_codes(codes, conv.images, conv.inputs),
        pointer(weights, np.int8, conv.weights),
        pointer(error, np.uint16, conv.images * conv.outputs),
        *_rescale(rescale, conv.out_channels),
        pointer(norm, np.float32, conv.out_channels),
        pointer(bias, np.float32, conv.out_channels),
        threads,
        pointer(acc, np.int32, conv.images * conv.outputs),
        pointer(sums, np.float64, 4 * conv.out_channels),
    )
    memory = (codes.data, weights, error, rescale.scale, rescale.shift, norm, bias, acc, sums)
    return CheckedCall(library.fedmpq_conv_backward_sums, arguments, memory)


def keep(acc: Memory, images: int, count: int, threads: int, kept: Memory) -> Call:
    """Accumulators as 16-bit numbers. Gives 1, or 0 if some are too large for that."""
    arguments = (
        pointer(acc, np.int32, images * count),
        *(images, count, threads),
        pointer(kept, np.int16, images * count),
    )
    return Call(library.fedmpq_keep, arguments, (acc, kept))


def kept_backward_sums(
    kept: Memory,
    images: int,
    pixels: int,
    channels: int,
    error: Memory,
    rescale: Rescale,
    norm: Memory,
    bias: Memory,
    threads: int,
    acc: Memory,
    sums: Memory,
) -> Call:
    """The same as `conv_backward_sums` from accumulators that were kept, in place of products."""
    arguments = (
        pointer(kept, np.int16, images * pixels * channels),
        *(images, pixels, channels),
        pointer(error, np.uint16, images * pixels * channels),
        *_rescale(rescale, channels),
        pointer(norm, np.float32, channels),
        pointer(bias, np.float32, channels),
        threads,
        pointer(acc, np.int32, images * pixels * channels),
        pointer(sums, np.float64, 4 * channels),
    )
    memory = (kept, error, rescale.scale, rescale.shift, norm, bias, acc, sums)
    return CheckedCall(library.fedmpq_kept_backward_sums, arguments, memory)


def conv_backward_input(
    conv: Conv, errors: Memory, weights: Memory, scale: Number, add: bool, threads: int, out: Memory
) -> Call:
    arguments = (
        ctypes.byref(conv),
        pointer(errors, np.int8, conv.images * conv.outputs),
        pointer(weights, np.int8, conv.weights),
        scale,
        add,
        threads,
        pointer(out, np.uint16, conv.images * conv.inputs),
    )
    return CheckedCall(library.fedmpq_conv_backward_input, arguments, (errors, weights, out))


def conv_backward_weights(
    conv: Conv, codes: StoredCodes, errors: Memory, scale: Memory, threads: int, gradient: Memory
) -> Call:
    arguments = (
        ctypes.byref(conv),
        *_codes(codes, conv.images, conv.inputs),
        pointer(errors, np.int8, conv.images * conv.outputs),
        pointer(scale, np.float32, conv.out_channels),
        threads,
        pointer(gradient, np.float32, conv.weights),
    )
    memory = (codes.data, errors, scale, gradient)
    return CheckedCall(library.fedmpq_conv_backward_weights, arguments, memory)


def requantize(
    acc: Memory,
    images: int,
    pixels: int,
    channels: int,
    rescale: Rescale,
    pairs: bool,
    threads: int,
    out: Memory,
) -> Call:
    arguments = (
        pointer(acc, np.int32, images * pixels * channels),
        *(images, pixels, channels),
        *_rescale(rescale, channels),
        *(pairs, threads),
        pointer(out, np.uint8, StoredCodes.nbytes(images, pixels * channels, pairs)),
    )
    return CheckedCall(library.fedmpq_requantize, arguments, (acc, rescale.scale, rescale.shift, out))


def backward_error(
    acc: Memory,
    error: Memory,
    images: int,
    pixels: int,
    channels: int,
    rescale: Rescale,
    norm: Memory,
    bias: Memory,
    gain: Memory,
    mean_g: Memory,
    mean_gx: Memory,
    threads: int,
    out: Memory,
    greatest: Memory,
) -> Call:
    """Turn errors of the output into those of the accumulators, maybe in place; the greatest by image."""
    vectors = (norm, bias, gain, mean_g, mean_gx)
    arguments = (
        pointer(acc, np.int32, images * pixels * channels),
        pointer(error, np.uint16, images * pixels * channels),
        *(images, pixels, channels),
        *_rescale(rescale, channels),
        *(pointer(vector, np.float32, channels) for vector in vectors),
        threads,
        pointer(out, np.uint16, images * pixels * channels),
        pointer(greatest, np.float32, images),
    )
    memory = (acc, error, rescale.scale, rescale.shift, *vectors, out, greatest)
    return Call(library.fedmpq_backward_error, arguments, memory)


def quantize_error(
    error: Memory,
    images: int,
    count: int,
    inverse: Number,
    counter: Counter,
    purpose: int,
    threads: int,
    out: Memory,
    step: c_uint32 | None = None,
) -> Call:
    """`step` is read when the call is made, in place of the counter's."""
    arguments = (
        pointer(error, np.uint16, images * count),
        images,
        count,
        inverse,
        counter.step if step is None else step,
        counter.round,
        counter.layer * 16 + purpose,
        counter.seed,
        counter.client,
        threads,
        pointer(out, np.int8, images * count),
    )
    return Call(library.fedmpq_quantize_error, arguments, (error, out))


def add(
    left: StoredCodes,
    right: StoredCodes,
    images: int,
    count: int,
    step: Number,
    low: int,
    high: int,
    pairs: bool,
    threads: int,
    out: Memory,
    states: Memory,
) -> Addition:
    arguments = (
        *(images, count, step, low, high, pairs, threads),
        pointer(out, np.uint8, StoredCodes.nbytes(images, count, pairs)),
        pointer(states, np.uint8, images * ((count + 3) // 4)),
    )
    return Addition(
        _codes(left, images, count),
        _codes(right, images, count),
        arguments,
        (left.data, right.data, out, states),
    )


def pass_error(states: Memory, images: int, count: int, threads: int, error: Memory, clipped: Memory) -> Call:
    """Zero the errors that were clipped; their sums above and below into `clipped`."""
    arguments = (
        pointer(states, np.uint8, images * ((count + 3) // 4)),
        *(images, count, threads),
        pointer(error, np.uint16, images * count),
        pointer(clipped, np.float64, 2),
    )
    return CheckedCall(library.fedmpq_pass_error, arguments, (states, error, clipped))


def add_errors(other: Memory, count: int, error: Memory) -> Call:
    arguments = pointer(other, np.uint16, count), count, pointer(error, np.uint16, count)
    return Call(library.fedmpq_add_errors, arguments, (other, error))


def max_pool(pool: Conv, codes: StoredCodes, threads: int, out: Memory) -> Call:
    where, pairs, _ = _codes(codes, pool.images, pool.inputs)
    room = StoredCodes.nbytes(pool.images, pool.outputs, codes.pairs)
    arguments = ctypes.byref(pool), where, pairs, threads, pointer(out, np.uint8, room)
    return CheckedCall(library.fedmpq_max_pool, arguments, (codes.data, out))


def max_pool_backward(pool: Conv, codes: StoredCodes, error: Memory, threads: int, out: Memory) -> Call:
    where, pairs, _ = _codes(codes, pool.images, pool.inputs)
    arguments = (
        *(ctypes.byref(pool), where, pairs),
        pointer(error, np.uint16, pool.images * pool.outputs),
        threads,
        pointer(out, np.uint16, pool.images * pool.inputs),
    )
    return CheckedCall(library.fedmpq_max_pool_backward, arguments, (codes.data, error, out))


def average_pool(
    pool: Conv, codes: StoredCodes, multiplier: Number, low: int, high: int, threads: int, out: Memory
) -> Call:
    arguments = (
        ctypes.byref(pool),
        *_codes(codes, pool.images, pool.inputs),
        *(multiplier, low, high, threads),
        pointer(out, np.uint8, pool.images * pool.outputs),
    )
    return CheckedCall(library.fedmpq_average_pool, arguments, (codes.data, out))


def average_pool_backward(pool: Conv, error: Memory, threads: int, out: Memory) -> Call:
    arguments = (
        ctypes.byref(pool),
        pointer(error, np.uint16, pool.images * pool.outputs),
        threads,
        pointer(out, np.uint16, pool.images * pool.inputs),
    )
    return CheckedCall(library.fedmpq_average_pool_backward, arguments, (error, out))


def softmax_loss(
    acc: Memory,
    samples: int,
    classes: int,
    scale: Memory,
    bias: Memory,
    labels: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    """Labels must lie within the classes. Gives the number of right answers."""
    arguments = (
        pointer(acc, np.int32, samples * classes),
        *(samples, classes),
        pointer(scale, np.float32, classes),
        pointer(bias, np.float32, classes),
        pointer(labels, np.int64, samples),
        pointer(gradient, np.float32, samples * classes),
        pointer(loss, np.float64, 1),
    )
    return Call(library.fedmpq_softmax_loss, arguments, (acc, scale, bias, labels, gradient, loss))


def halve_errors(real: Memory, rows: int, channels: int, gain: Memory, error: Memory) -> Call:
    """Errors `real * gain` as bfloat16. Gives the greatest magnitude."""
    arguments = (
        pointer(real, np.float32, rows * channels),
        *(rows, channels),
        pointer(gain, np.float32, channels),
        pointer(error, np.uint16, rows * channels),
    )
    return Call(library.fedmpq_halve_errors, arguments, (real, gain, error))


def update_codes(update: CodeUpdate, gradient: Memory, codes: Memory) -> Call:
    """Gives 0, or another number if the gradient, or its sum with the momentum, is not finite."""
    arguments = (
        ctypes.byref(update),
        pointer(gradient, np.float32, update.count),
        pointer(codes, np.uint8, update.count),
    )
    return Call(library.fedmpq_update_codes, arguments, (gradient, codes))


def _codes(codes: StoredCodes, images: int, elements: int) -> tuple[Any, bool, int]:
    where = pointer(codes.data, np.uint8, StoredCodes.nbytes(images, elements, codes.pairs))
    return where, codes.pairs, codes.zero


def _rescale(rescale: Rescale, channels: int) -> tuple[Any, Any, int, int]:
    scale, shift = (pointer(vector, np.float32, channels) for vector in (rescale.scale, rescale.shift))
    return scale, shift, rescale.low, rescale.high
