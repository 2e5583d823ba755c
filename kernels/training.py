"""Integer training in C++: `include/fedmpq/training.h` states what is computed and how tensors are stored.

These are thin: they check types and sizes, and call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.library import library

MAX_TAPS = 1024
MAX_THREADS = 64
MOMENTUM_BLOCK = 128

Bytes = NDArray[np.uint8]
Sums = NDArray[np.int32]
Errors = NDArray[np.uint16]
Floats = NDArray[np.float32]


class Conv(ctypes.Structure):
    """`FedmpqConv`: a convolution or a pool."""

    _fields_ = [
        (name, c_int32)
        for name in (
            *("images", "height", "width", "channels", "out_height", "out_width", "out_channels"),
            *(
                "kernel_h",
                "kernel_w",
                "stride_h",
                "stride_w",
                "pad_h",
                "pad_w",
                "dilation_h",
                "dilation_w",
                "groups",
            ),
        )
    ]

    @property
    def inputs(self) -> int:
        """Elements of one input image."""
        return int(self.height * self.width * self.channels)

    @property
    def outputs(self) -> int:
        """Elements of one output image."""
        return int(self.out_height * self.out_width * self.out_channels)

    @property
    def pixels(self) -> int:
        return int(self.out_height * self.out_width)

    @property
    def weights(self) -> int:
        return int(self.out_channels * (self.channels // self.groups) * self.kernel_h * self.kernel_w)


class _Codes(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("pairs", c_int32), ("zero", c_int32), ("scale", c_float)]


class _Update(ctypes.Structure):
    _fields_ = [
        ("bits", c_int32),
        ("paper", c_int32),
        ("count", c_int64),
        ("row", c_int64),
        ("step", c_void_p),
        ("rate", c_void_p),
        ("weight_decay", c_float),
        ("momentum", c_float),
        ("momentum_bits", c_int32),
        ("momentum_codes", c_void_p),
        ("momentum_scales", c_void_p),
        ("pull", c_void_p),
        ("step_number", c_uint32),
        ("round", c_uint32),
        ("layer", c_uint32),
        ("seed", c_uint32),
        ("client", c_uint32),
    ]


@dataclass(frozen=True)
class StoredCodes:
    """A batch of codes: bytes `code + zero`, or two 4-bit ones a byte."""

    data: Bytes
    pairs: bool
    zero: int

    @staticmethod
    def nbytes(images: int, elements: int, pairs: bool) -> int:
        return images * ((elements + 1) // 2 if pairs else elements)


@dataclass(frozen=True)
class Counter:
    """Where in the random numbers of a run a draw stands."""

    seed: int
    client: int
    round: int
    layer: int
    step: int


@dataclass
class MomentumBuffer:
    """Momentum of one layer in the form that `fedmpq_update_codes` keeps it."""

    bits: int
    codes: NDArray[Any]
    scales: Floats

    @classmethod
    def zeros(cls, count: int, bits: int) -> MomentumBuffer:
        blocks = -(-count // MOMENTUM_BLOCK)
        if bits == 32:
            return cls(bits, np.zeros(count, np.float32), np.zeros(0, np.float32))
        if bits == 8:
            return cls(bits, np.zeros(blocks * MOMENTUM_BLOCK, np.int8), np.zeros(blocks, np.float32))
        return cls(0, np.zeros(0, np.int8), np.zeros(0, np.float32))


@dataclass(frozen=True)
class Rescale:
    """`t = acc * scale + shift` per channel; codes are `clamp(rint(t), low, high)`."""

    scale: Floats
    shift: Floats
    low: int
    high: int


def conv_forward(
    conv: Conv,
    codes: StoredCodes,
    weights: NDArray[np.int8],
    threads: int,
    acc: Sums,
    statistics: bool = False,
) -> NDArray[np.float64]:
    """Accumulators into `acc`; if asked for, each channel's sum and sum of squares, `(2, out_channels)`."""
    sums = np.empty((2, conv.out_channels if statistics else 0), np.float64)
    _checked(
        library.fedmpq_conv_forward(
            ctypes.byref(conv),
            _codes_pointer(codes, conv.images, conv.inputs),
            codes.pairs,
            codes.zero,
            _pointer(weights, np.int8, conv.weights),
            threads,
            _pointer(acc, np.int32, conv.images * conv.outputs),
            sums.ctypes.data if statistics else None,
        )
    )
    return sums


def force_bit_serial(most_bits: int) -> None:
    """Use the bit-serial form for 4-bit codes with weights of up to `most_bits`; -1: where it is faster."""
    library.fedmpq_force_bit_serial(most_bits)


def conv_backward_sums(
    conv: Conv,
    codes: StoredCodes,
    weights: NDArray[np.int8],
    error: Errors,
    rescale: Rescale,
    norm: Floats,
    bias: Floats,
    threads: int,
    acc: Sums,
) -> NDArray[np.float64]:
    """Accumulators again into `acc`, and `(4, out_channels)` sums: of errors passed, of those times the
    normalized value, and of errors clipped above and below."""
    sums = np.empty((4, conv.out_channels), np.float64)
    _checked(
        library.fedmpq_conv_backward_sums(
            ctypes.byref(conv),
            _codes_pointer(codes, conv.images, conv.inputs),
            codes.pairs,
            codes.zero,
            _pointer(weights, np.int8, conv.weights),
            _pointer(error, np.uint16, conv.images * conv.outputs),
            *_rescale_arguments(rescale, conv.out_channels),
            _pointer(norm, np.float32, conv.out_channels),
            _pointer(bias, np.float32, conv.out_channels),
            threads,
            _pointer(acc, np.int32, conv.images * conv.outputs),
            sums.ctypes.data,
        )
    )
    return sums


def conv_backward_input(
    conv: Conv,
    errors: NDArray[np.int8],
    weights: NDArray[np.int8],
    scale: float,
    add: bool,
    threads: int,
    out: Errors,
) -> None:
    _checked(
        library.fedmpq_conv_backward_input(
            ctypes.byref(conv),
            _pointer(errors, np.int8, conv.images * conv.outputs),
            _pointer(weights, np.int8, conv.weights),
            scale,
            add,
            threads,
            _pointer(out, np.uint16, conv.images * conv.inputs),
        )
    )


def conv_backward_weights(
    conv: Conv, codes: StoredCodes, errors: NDArray[np.int8], scale: Floats, threads: int, gradient: Floats
) -> None:
    _checked(
        library.fedmpq_conv_backward_weights(
            ctypes.byref(conv),
            _codes_pointer(codes, conv.images, conv.inputs),
            codes.pairs,
            codes.zero,
            _pointer(errors, np.int8, conv.images * conv.outputs),
            _pointer(scale, np.float32, conv.out_channels),
            threads,
            _pointer(gradient, np.float32, conv.weights),
        )
    )


def requantize(
    acc: Sums,
    images: int,
    pixels: int,
    channels: int,
    rescale: Rescale,
    pairs: bool,
    threads: int,
    out: Bytes,
) -> None:
    _checked(
        library.fedmpq_requantize(
            _pointer(acc, np.int32, images * pixels * channels),
            images,
            pixels,
            channels,
            _pointer(rescale.scale, np.float32, channels),
            _pointer(rescale.shift, np.float32, channels),
            rescale.low,
            rescale.high,
            pairs,
            threads,
            _pointer(out, np.uint8, StoredCodes.nbytes(images, pixels * channels, pairs)),
        )
    )


def backward_error(
    acc: Sums,
    error: Errors,
    images: int,
    pixels: int,
    channels: int,
    rescale: Rescale,
    norm: Floats,
    bias: Floats,
    gain: Floats,
    mean_g: Floats,
    mean_gx: Floats,
    threads: int,
) -> float:
    """Turn errors of the output into those of the accumulators, in place; the greatest magnitude."""
    greatest = np.empty(images, np.float32)
    vectors = (_pointer(vector, np.float32, channels) for vector in (norm, bias, gain, mean_g, mean_gx))
    library.fedmpq_backward_error(
        _pointer(acc, np.int32, images * pixels * channels),
        _pointer(error, np.uint16, images * pixels * channels),
        images,
        pixels,
        channels,
        *_rescale_arguments(rescale, channels),
        *vectors,
        threads,
        greatest.ctypes.data,
    )
    return float(greatest.max(initial=0.0))


def quantize_error(
    error: Errors,
    images: int,
    count: int,
    inverse: float,
    counter: Counter,
    purpose: int,
    threads: int,
    out: NDArray[np.int8],
) -> None:
    library.fedmpq_quantize_error(
        _pointer(error, np.uint16, images * count),
        images,
        count,
        inverse,
        counter.step,
        counter.round,
        counter.layer * 16 + purpose,
        counter.seed,
        counter.client,
        threads,
        _pointer(out, np.int8, images * count),
    )


def add(
    left: StoredCodes,
    left_scale: float,
    right: StoredCodes,
    right_scale: float,
    images: int,
    count: int,
    step: float,
    low: int,
    high: int,
    pairs: bool,
    threads: int,
    out: Bytes,
    states: Bytes,
) -> None:
    first = _Codes(_codes_pointer(left, images, count), left.pairs, left.zero, left_scale)
    second = _Codes(_codes_pointer(right, images, count), right.pairs, right.zero, right_scale)
    _checked(
        library.fedmpq_add(
            ctypes.byref(first),
            ctypes.byref(second),
            images,
            count,
            step,
            low,
            high,
            pairs,
            threads,
            _pointer(out, np.uint8, StoredCodes.nbytes(images, count, pairs)),
            _pointer(states, np.uint8, images * ((count + 3) // 4)),
        )
    )


def pass_error(states: Bytes, images: int, count: int, threads: int, error: Errors) -> tuple[float, float]:
    """Zero the errors that were clipped; their sums above and below."""
    clipped = np.empty(2, np.float64)
    _checked(
        library.fedmpq_pass_error(
            _pointer(states, np.uint8, images * ((count + 3) // 4)),
            images,
            count,
            threads,
            _pointer(error, np.uint16, images * count),
            clipped.ctypes.data,
        )
    )
    return float(clipped[0]), float(clipped[1])


def add_errors(other: Errors, error: Errors) -> None:
    library.fedmpq_add_errors(
        _pointer(other, np.uint16, error.size), error.size, _pointer(error, np.uint16, error.size)
    )


def max_pool(pool: Conv, codes: StoredCodes, threads: int, out: Bytes) -> None:
    _checked(
        library.fedmpq_max_pool(
            ctypes.byref(pool),
            _codes_pointer(codes, pool.images, pool.inputs),
            codes.pairs,
            threads,
            _pointer(out, np.uint8, StoredCodes.nbytes(pool.images, pool.outputs, codes.pairs)),
        )
    )


def max_pool_backward(pool: Conv, codes: StoredCodes, error: Errors, threads: int, out: Errors) -> None:
    _checked(
        library.fedmpq_max_pool_backward(
            ctypes.byref(pool),
            _codes_pointer(codes, pool.images, pool.inputs),
            codes.pairs,
            _pointer(error, np.uint16, pool.images * pool.outputs),
            threads,
            _pointer(out, np.uint16, pool.images * pool.inputs),
        )
    )


def average_pool(
    pool: Conv, codes: StoredCodes, multiplier: float, low: int, high: int, threads: int, out: Bytes
) -> None:
    _checked(
        library.fedmpq_average_pool(
            ctypes.byref(pool),
            _codes_pointer(codes, pool.images, pool.inputs),
            codes.pairs,
            codes.zero,
            multiplier,
            low,
            high,
            threads,
            _pointer(out, np.uint8, pool.images * pool.outputs),
        )
    )


def average_pool_backward(pool: Conv, error: Errors, threads: int, out: Errors) -> None:
    _checked(
        library.fedmpq_average_pool_backward(
            ctypes.byref(pool),
            _pointer(error, np.uint16, pool.images * pool.outputs),
            threads,
            _pointer(out, np.uint16, pool.images * pool.inputs),
        )
    )


def softmax_loss(
    acc: Sums, samples: int, classes: int, scale: Floats, bias: Floats, labels: NDArray[np.int64]
) -> tuple[float, int, Floats]:
    """Mean loss, number of right answers, and the gradient of the logits `(samples, classes)`."""
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}; the model has {classes} classes")
    gradient, loss = np.empty((samples, classes), np.float32), np.empty(1, np.float64)
    right = library.fedmpq_softmax_loss(
        _pointer(acc, np.int32, samples * classes),
        samples,
        classes,
        _pointer(scale, np.float32, classes),
        _pointer(bias, np.float32, classes),
        _pointer(labels, np.int64, samples),
        gradient.ctypes.data,
        loss.ctypes.data,
    )
    return float(loss[0]), int(right), gradient


def halve_errors(real: Floats, gain: Floats, error: Errors) -> float:
    """Errors `real * gain` as bfloat16; the greatest magnitude."""
    rows, channels = real.shape
    pointers = (_pointer(real, np.float32, real.size), rows, channels, _pointer(gain, np.float32, channels))
    return float(library.fedmpq_halve_errors(*pointers, _pointer(error, np.uint16, real.size)))


def update_codes(
    codes: Bytes,
    gradient: Floats,
    *,
    bits: int,
    paper: bool,
    step: Floats,
    rate: Floats,
    weight_decay: float,
    momentum: float,
    buffer: MomentumBuffer,
    pull: Floats | None,
    counter: Counter,
) -> bool:
    """One update in place; False if the gradient, or its sum with the momentum, is not finite."""
    if pull is not None and pull.size != 1 << (bits - 1):
        raise ValueError(f"the Lasso's table has {pull.size} entries; {bits} bits need {1 << (bits - 1)}")
    if step.size not in (1, 0) and codes.size % step.size:
        raise ValueError(f"{step.size} steps do not divide {codes.size} weights")
    update = _Update(
        bits=bits,
        paper=paper,
        count=codes.size,
        row=codes.size // max(1, step.size),
        step=_pointer(step, np.float32, step.size),
        rate=_pointer(rate, np.float32, step.size),
        weight_decay=weight_decay,
        momentum=momentum,
        momentum_bits=buffer.bits,
        momentum_codes=buffer.codes.ctypes.data,
        momentum_scales=buffer.scales.ctypes.data,
        pull=None if pull is None else _pointer(pull, np.float32, pull.size),
        step_number=counter.step,
        round=counter.round,
        layer=counter.layer,
        seed=counter.seed,
        client=counter.client,
    )
    pointers = _pointer(gradient, np.float32, codes.size), _pointer(codes, np.uint8, codes.size)
    return bool(library.fedmpq_update_codes(ctypes.byref(update), *pointers) == 0)


def _pointer(array: NDArray[Any], dtype: type[np.generic], size: int) -> int:
    """The array's address; a buffer of another type or too small must never reach the library."""
    if array.dtype != dtype or not array.flags.c_contiguous or array.size < size:
        raise ValueError(
            f"a buffer of {array.size} {array.dtype} where {size} contiguous {dtype.__name__} are due"
        )
    # Several times faster than array.ctypes, and a step has a thousand of them.
    address: int = array.__array_interface__["data"][0]
    return address


def _codes_pointer(codes: StoredCodes, images: int, elements: int) -> int:
    return _pointer(codes.data, np.uint8, StoredCodes.nbytes(images, elements, codes.pairs))


def _rescale_arguments(rescale: Rescale, channels: int) -> tuple[int, int, int, int]:
    scale, shift = (_pointer(vector, np.float32, channels) for vector in (rescale.scale, rescale.shift))
    return scale, shift, rescale.low, rescale.high


def _checked(status: int) -> None:
    if status == -1:
        raise MemoryError(
            "not enough memory for the scratch buffers of a training kernel; use a smaller batch"
        )
    if status != 0:
        raise ValueError("an image is too large for the training kernels' 32-bit sums; use smaller images")
