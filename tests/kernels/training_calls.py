"""The training kernels, one call at a time: each is bound to its arguments, called, its results returned."""

from __future__ import annotations

from ctypes import c_uint32

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import (
    CodeUpdate,
    Conv,
    Counter,
    Floats,
    MomentumBuffer,
    Normalize,
    Rescale,
    StoredCodes,
)

Bytes = NDArray[np.uint8]
Sums = NDArray[np.int32]
Errors = NDArray[np.uint16]


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
    bound.conv_forward(conv, codes, weights, threads, acc, sums if statistics else None)()
    return sums


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
    normalize = Normalize(norm, bias)
    bound.conv_backward_sums(conv, codes, weights, None, error, rescale, normalize, threads, acc, sums)()
    return sums


def keep(acc: Sums, images: int, count: int, threads: int, kept: NDArray[np.int16]) -> bool:
    """Accumulators as 16-bit numbers; false if some are too large for that."""
    fit = np.full(1, 7, np.int32)
    bound.keep(acc, images, count, threads, kept, fit)()
    return bool(fit[0])


def kept_backward_sums(
    kept: NDArray[np.int16],
    images: int,
    pixels: int,
    channels: int,
    error: Errors,
    rescale: Rescale,
    norm: Floats,
    bias: Floats,
    threads: int,
    acc: Sums,
) -> NDArray[np.float64]:
    """The same as `conv_backward_sums` from accumulators that were kept, in place of products."""
    sums = np.empty((4, channels), np.float64)
    conv = Conv.over(images, (1, pixels, 1), out_channels=channels)
    codes, weights = StoredCodes(np.zeros(images * pixels, np.uint8), False, 0), np.zeros(channels, np.int8)
    held, normalize = (kept, np.ones(1, np.int32)), Normalize(norm, bias)
    bound.conv_backward_sums(conv, codes, weights, held, error, rescale, normalize, threads, acc, sums)()
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
    bound.conv_backward_input(conv, errors, weights, scale, add, threads, out)()


def conv_backward_weights(
    conv: Conv, codes: StoredCodes, errors: NDArray[np.int8], scale: Floats, threads: int, gradient: Floats
) -> None:
    bound.conv_backward_weights(conv, codes, errors, scale, threads, gradient)()


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
    bound.requantize(acc, FedmpqExtent(images, pixels, channels), rescale, pairs, threads, out)()


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
    out: Errors,
) -> float:
    """Turn errors of the output into those of the accumulators, maybe in place; the greatest magnitude."""
    greatest = np.empty(images, np.float32)
    extent, normalize = FedmpqExtent(images, pixels, channels), Normalize(norm, bias)
    vectors = (gain, mean_g, mean_gx)
    bound.backward_error(acc, error, extent, rescale, normalize, *vectors, threads, out, greatest)()
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
    bound.quantize_error(error, images, count, inverse, counter, purpose, threads, out)()


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
    scaled = left, left_scale, right, right_scale
    bound.add(*scaled, images, count, step, low, high, pairs, threads, out, states)()


def pass_error(states: Bytes, images: int, count: int, threads: int, error: Errors) -> tuple[float, float]:
    """Zero the errors that were clipped; their sums above and below."""
    clipped = np.empty(2, np.float64)
    bound.pass_error(states, images, count, threads, error, clipped)()
    return float(clipped[0]), float(clipped[1])


def add_errors(other: Errors, error: Errors) -> None:
    bound.add_errors(other, error.size, error)()


def softmax_loss(
    acc: Sums,
    samples: int,
    classes: int,
    scale: Floats,
    bias: Floats,
    labels: NDArray[np.int64],
    shift: Floats | None = None,
) -> tuple[float, int, Floats]:
    """Mean loss, number of right answers, and the gradient of the logits `(samples, classes)`."""
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}; the model has {classes} classes")
    gradient, loss = np.empty((samples, classes), np.float32), np.empty(1, np.float64)
    shift = np.zeros(classes, np.float32) if shift is None else shift
    right = bound.softmax_loss(acc, samples, classes, scale, bias, shift, labels, gradient, loss)()
    return float(loss[0]), int(right), gradient


def halve_errors(real: Floats, gain: Floats, error: Errors) -> float:
    """Errors `real * gain` as bfloat16; the greatest magnitude."""
    rows, channels = real.shape
    greatest = np.empty(1, np.float32)
    bound.halve_errors(real, rows, channels, gain, error, greatest)()
    return float(greatest[0])


def update_codes(
    codes: Bytes,
    gradient: Floats,
    *,
    bits: int,
    fractions: NDArray[np.int8] | None,
    step: Floats,
    rate: Floats,
    weight_decay: float,
    momentum: float,
    buffer: MomentumBuffer,
    pull: Floats | None,
    counter: Counter,
    threads: int = 1,
) -> bool:
    """One update in place; False if the gradient, or its sum with the momentum, is not finite."""
    update = CodeUpdate.of(
        codes.size,
        bits=bits,
        fractions=fractions,
        step=step,
        rate=rate,
        weight_decay=weight_decay,
        momentum=momentum,
        buffer=buffer,
        counter=counter,
    )
    update.pull_by(pull)
    try:
        bound.update_codes(update, c_uint32(counter.step), threads, gradient, codes)()
    except FloatingPointError:
        return False
    return True
