"""The training kernels as bound calls (`call`); `include/fedmpq/training.h` states what is computed."""

from __future__ import annotations

from ctypes import c_uint32

import numpy as np

from fedmpq.kernels.call import Call, CheckedCall, Elements, Number
from fedmpq.kernels.memory import Memory
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import CodeUpdate, Conv, Counter, Normalize, Rescale, StoredCodes, WeightCodes

TABLE = 256
"""Entries of a table over stored codes."""

Weights = Memory | WeightCodes
"""Int8 weights, or the codes that stand for them."""


def conv_forward(
    conv: Conv, codes: StoredCodes, weights: Weights, threads: int, acc: Memory | None, sums: Memory | None
) -> Call:
    """Accumulators into `acc`, if there is one, and, if wanted, each channel's sum and sum of squares into
    `sums`."""
    return CheckedCall(
        "fedmpq_conv_forward",
        conv,
        codes.struct(conv.images, conv.inputs),
        *_weights(weights, conv),
        threads,
        None if acc is None else Elements(acc, conv.images * conv.outputs),
        None if sums is None else Elements(sums, 2 * conv.out_channels),
    )


def conv_backward_sums(
    conv: Conv,
    codes: StoredCodes,
    weights: Weights,
    kept: tuple[Memory, Memory] | None,
    error: Memory,
    rescale: Rescale,
    normalize: Normalize,
    threads: int,
    acc: Memory | None,
    sums: Memory,
) -> Call:
    """Accumulators again into `acc`, if there is one, and into `sums`, by channel: the sum of errors passed,
    of those times the normalized value, and of errors clipped above and below. What `keep` has `kept`, and
    whether it fits, takes the place of products if it does fit, and if there is memory for it."""
    held, fit = (None, None) if kept is None else kept
    return CheckedCall(
        "fedmpq_conv_backward_sums",
        conv,
        codes.struct(conv.images, conv.inputs),
        *_weights(weights, conv),
        None if held is None else Elements(held, conv.images * conv.outputs),
        None if fit is None else Elements(fit, 1),
        Elements(error, conv.images * conv.outputs),
        rescale.struct(conv.out_channels),
        normalize.struct(conv.out_channels),
        threads,
        None if acc is None else Elements(acc, conv.images * conv.outputs),
        Elements(sums, 4 * conv.out_channels),
    )


def keep(acc: Memory, images: int, count: int, threads: int, kept: Memory, fit: Memory) -> Call:
    """Accumulators as 16-bit numbers; 1 into `fit`, or 0 if some are too large for that."""
    total = images * count
    places = Elements(kept, total), Elements(fit, 1)
    return CheckedCall("fedmpq_keep", Elements(acc, total), images, count, threads, *places)


def conv_backward_input(
    conv: Conv, errors: Memory, weights: Weights, scale: Number, add: bool, threads: int, out: Memory
) -> Call:
    return CheckedCall(
        "fedmpq_conv_backward_input",
        conv,
        Elements(errors, conv.images * conv.outputs),
        *_weights(weights, conv),
        scale,
        add,
        threads,
        Elements(out, conv.images * conv.inputs),
    )


def conv_backward_weights(
    conv: Conv, codes: StoredCodes, errors: Memory, scale: Memory, threads: int, gradient: Memory
) -> Call:
    return CheckedCall(
        "fedmpq_conv_backward_weights",
        conv,
        codes.struct(conv.images, conv.inputs),
        Elements(errors, conv.images * conv.outputs),
        Elements(scale, conv.out_channels),
        threads,
        Elements(gradient, conv.weights),
    )


def requantize(
    acc: Memory, extent: FedmpqExtent, rescale: Rescale, pairs: bool, threads: int, out: Memory
) -> Call:
    elements = extent.pixels * extent.channels
    return CheckedCall(
        "fedmpq_requantize",
        Elements(acc, extent.images * elements),
        extent,
        rescale.struct(extent.channels),
        pairs,
        threads,
        Elements(out, StoredCodes.nbytes(extent.images, elements, pairs)),
    )


def backward_error(
    acc: Memory,
    error: Memory,
    extent: FedmpqExtent,
    rescale: Rescale,
    normalize: Normalize,
    gain: Memory,
    mean_g: Memory,
    mean_gx: Memory,
    threads: int,
    out: Memory,
    greatest: Memory,
) -> Call:
    """Turn errors of the output into those of the accumulators, maybe in place; the greatest by image."""
    total, channels = extent.images * extent.pixels * extent.channels, extent.channels
    return CheckedCall(
        "fedmpq_backward_error",
        Elements(acc, total),
        Elements(error, total),
        extent,
        rescale.struct(channels),
        normalize.struct(channels),
        Elements(gain, channels),
        Elements(mean_g, channels),
        Elements(mean_gx, channels),
        threads,
        Elements(out, total),
        Elements(greatest, extent.images),
    )


def conv_requantize(
    conv: Conv, codes: StoredCodes, weights: Weights, rescale: Rescale, pairs: bool, threads: int, out: Memory
) -> Call:
    """What `requantize` makes of accumulators, which are computed for it alone."""
    return CheckedCall(
        "fedmpq_conv_requantize",
        conv,
        codes.struct(conv.images, conv.inputs),
        *_weights(weights, conv),
        rescale.struct(conv.out_channels),
        pairs,
        threads,
        Elements(out, StoredCodes.nbytes(conv.images, conv.outputs, pairs)),
    )


def conv_backward_error(
    conv: Conv,
    codes: StoredCodes,
    weights: Weights,
    error: Memory,
    rescale: Rescale,
    normalize: Normalize,
    gain: Memory,
    mean_g: Memory,
    mean_gx: Memory,
    threads: int,
    out: Memory,
    greatest: Memory,
) -> Call:
    """What `backward_error` makes of accumulators, which are computed for it alone."""
    total, channels = conv.images * conv.outputs, conv.out_channels
    return CheckedCall(
        "fedmpq_conv_backward_error",
        conv,
        codes.struct(conv.images, conv.inputs),
        *_weights(weights, conv),
        Elements(error, total),
        rescale.struct(channels),
        normalize.struct(channels),
        Elements(gain, channels),
        Elements(mean_g, channels),
        Elements(mean_gx, channels),
        threads,
        Elements(out, total),
        Elements(greatest, conv.images),
    )


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
    return CheckedCall(
        "fedmpq_quantize_error",
        Elements(error, images * count),
        images,
        count,
        inverse,
        *counter.stream(purpose, step),
        threads,
        Elements(out, images * count),
    )


def add(
    left: StoredCodes,
    left_scale: Number,
    right: StoredCodes,
    right_scale: Number,
    images: int,
    count: int,
    step: Number,
    low: int,
    high: int,
    pairs: bool,
    threads: int,
    out: Memory,
    states: Memory,
) -> Call:
    return CheckedCall(
        "fedmpq_add",
        left.struct(images, count),
        left_scale,
        right.struct(images, count),
        right_scale,
        images,
        count,
        step,
        low,
        high,
        pairs,
        threads,
        Elements(out, StoredCodes.nbytes(images, count, pairs)),
        Elements(states, images * ((count + 3) // 4)),
    )


def clip_gradient(clipped: Memory, below: bool, clip: Memory) -> Call:
    """The gradient of a clip from the sums of errors that were clipped above and, if it counts, below."""
    return CheckedCall("fedmpq_clip_gradient", Elements(clipped, 2), below, Elements(clip, 1))


def pass_error(states: Memory, images: int, count: int, threads: int, error: Memory, clipped: Memory) -> Call:
    """Zero the errors that were clipped; their sums above and below into `clipped`."""
    return CheckedCall(
        "fedmpq_pass_error",
        Elements(states, images * ((count + 3) // 4)),
        images,
        count,
        threads,
        Elements(error, images * count),
        Elements(clipped, 2),
    )


def lookup(
    codes: StoredCodes, images: int, count: int, table: Memory, pairs: bool, threads: int, out: Memory
) -> Call:
    return CheckedCall(
        "fedmpq_lookup",
        codes.struct(images, count),
        images,
        count,
        Elements(table, TABLE),
        pairs,
        threads,
        Elements(out, StoredCodes.nbytes(images, count, pairs)),
    )


def lookup_backward(
    codes: StoredCodes,
    images: int,
    count: int,
    slopes: Memory,
    states: Memory,
    threads: int,
    error: Memory,
    clipped: Memory,
) -> Call:
    """Errors times the slopes of their codes; sums of those that were clipped into `clipped`."""
    return CheckedCall(
        "fedmpq_lookup_backward",
        codes.struct(images, count),
        images,
        count,
        Elements(slopes, TABLE),
        Elements(states, TABLE),
        threads,
        Elements(error, images * count),
        Elements(clipped, 2),
    )


def multiply(
    left: StoredCodes,
    right: StoredCodes,
    extent: FedmpqExtent,
    spread: bool,
    multiplier: Number,
    low: int,
    high: int,
    pairs: bool,
    threads: int,
    out: Memory,
) -> Call:
    images, count = extent.images, extent.pixels * extent.channels
    return CheckedCall(
        "fedmpq_multiply",
        left.struct(images, count),
        right.struct(images, extent.channels if spread else count),
        extent,
        spread,
        multiplier,
        low,
        high,
        pairs,
        threads,
        Elements(out, StoredCodes.nbytes(images, count, pairs)),
    )


def multiply_backward(
    left: StoredCodes,
    right: StoredCodes,
    extent: FedmpqExtent,
    spread: bool,
    multiplier: Number,
    low: int,
    high: int,
    left_scale: Number,
    right_scale: Number,
    error: Memory,
    threads: int,
    left_error: Memory,
    right_error: Memory,
    clipped: Memory,
) -> Call:
    """The errors of both factors, the left one maybe in place of the product's; sums of clipped errors."""
    images, count = extent.images, extent.pixels * extent.channels
    rights = extent.channels if spread else count
    return CheckedCall(
        "fedmpq_multiply_backward",
        left.struct(images, count),
        right.struct(images, rights),
        extent,
        spread,
        multiplier,
        low,
        high,
        left_scale,
        right_scale,
        Elements(error, images * count),
        threads,
        Elements(left_error, images * count),
        Elements(right_error, images * rights),
        Elements(clipped, 2),
    )


def add_errors(other: Memory, count: int, error: Memory) -> Call:
    return CheckedCall("fedmpq_add_errors", Elements(other, count), count, Elements(error, count))


def softmax_loss(
    acc: Memory,
    samples: int,
    classes: int,
    scale: Memory,
    bias: Memory,
    shift: Memory,
    labels: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    """Labels that do not lie within the classes are refused. Gives the number of right answers."""
    return CheckedCall(
        "fedmpq_softmax_loss",
        Elements(acc, samples * classes),
        samples,
        classes,
        Elements(scale, classes),
        Elements(bias, classes),
        Elements(shift, classes),
        Elements(labels, samples),
        Elements(gradient, samples * classes),
        Elements(loss, 1),
    )


def halve_errors(
    real: Memory, rows: int, channels: int, gain: Memory, error: Memory, greatest: Memory
) -> Call:
    """Errors `real * gain` as bfloat16, and the greatest magnitude."""
    return CheckedCall(
        "fedmpq_halve_errors",
        Elements(real, rows * channels),
        rows,
        channels,
        Elements(gain, channels),
        Elements(error, rows * channels),
        Elements(greatest, 1),
    )


def update_codes(update: CodeUpdate, step: c_uint32, threads: int, gradient: Memory, codes: Memory) -> Call:
    """`step`, the number of the step, is read when the call is made. Raises FloatingPointError if the
    gradient, or its sum with the momentum, is not finite."""
    moved = Elements(gradient, update.count), Elements(codes, update.count)
    return CheckedCall("fedmpq_update_codes", update, step, threads, *moved)


def _weights(weights: Weights, conv: Conv) -> tuple[Elements, c_uint32]:
    """The bytes of a layer's weights, and the bits of their codes, 0 if they are the weights themselves."""
    if isinstance(weights, WeightCodes):
        return Elements(weights.codes.view(np.int8), conv.weights), weights.bits
    return Elements(weights, conv.weights), c_uint32()
