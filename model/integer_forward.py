"""The integer eval forward: **this is the model**. Evaluation runs it; every export must equal it to the bit.

Activations are kept NHWC. Sums of products are integers; a BLAS in float32 carries them exactly as long as
`fan-in * |code| * |weight| < 2^24`, and where that does not hold float64 does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.code_products import MultiplyCodes
from fedmpq.model.graph import INPUT, Conv2d, Graph, Linear
from fedmpq.model.integer_program import (
    Accumulate,
    AddCodes,
    Dequantize,
    IntegerProgram,
    QuantizeReal,
    Requantize,
    Step,
)
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.shape_steps import ConcatCodes, ShapeStep, clamped, computed

Array = NDArray[np.int32] | NDArray[np.float32]
Codes = NDArray[np.int32]
Products = Callable[[Codes, NDArray[np.int8], Conv2d | Linear, int], Codes]
"""`(codes NHWC, integer weights, op, greatest |code|) -> int32 sums of products`; exact in every engine."""

EXACT_FLOAT32 = 2**24
CACHED_NUMBERS = 2**19
"""Numbers of 32 bits in the largest value of a batch, so that the few that a step reads and writes stay in a
cache of some megabytes: with all of 250 images of 32x32 in a batch, ResNet-20 takes 1.7 times as long."""
GREATEST_BATCH = 250
PASS_NUMBERS = 2**16
"""Of a value that several passes go over, so many numbers at a time: what one writes the next finds in the
cache, and a board needs room for their copies alone."""


def cached_batch(graph: Graph) -> int:
    """How many images at a time are evaluated fastest."""
    largest = max(prod(shape) for shape in graph.shapes.values())
    return max(1, min(GREATEST_BATCH, CACHED_NUMBERS // largest))


def logits(
    program: IntegerProgram,
    images: NDArray[np.uint8],
    *,
    products: Products | None = None,
    batch: int | None = None,
) -> NDArray[np.float32]:
    """Logits `(N, classes)` of uint8 images `(N, H, W, C)`, `batch` at a time, by default `cached_batch`."""
    if batch is None:
        batch = cached_batch(program.graph)
    if batch < 1:
        raise ValueError(f"batch = {batch} is too small; the least is 1")
    _check_images(program, images)
    run = products or numpy_products
    parts = [_run(program, images[i : i + batch], run) for i in range(0, len(images), batch)]
    classes = program.graph.shapes[program.graph.output][0]
    return np.concatenate(parts) if parts else np.zeros((0, classes), np.float32)


def trace_values(
    program: IntegerProgram, images: NDArray[np.uint8], *, products: Products | None = None
) -> dict[str, Array]:
    """Every intermediate value by name, for comparing runtimes layer by layer (one batch)."""
    _check_images(program, images)
    values: dict[str, Array] = {INPUT: images.astype(np.int32) - program.graph.input.zero_point}
    for step in program.steps:
        values[step.output] = apply(step, values, products or numpy_products)
    return values


def _check_images(program: IntegerProgram, images: NDArray[np.uint8]) -> None:
    image = program.graph.input
    if images.ndim != 4 or images.shape[1:] != (image.height, image.width, image.channels):
        raise ValueError(
            f"images have shape {images.shape},"
            f" the model takes (N, {image.height}, {image.width}, {image.channels})"
        )
    if images.dtype != np.uint8:
        raise ValueError(f"images are {images.dtype}, the model takes pixels as uint8")


def _run(program: IntegerProgram, images: NDArray[np.uint8], products: Products) -> NDArray[np.float32]:
    last_reads, spent = last_readings(program), read_once(program)
    values: dict[str, Array] = {INPUT: images.astype(np.int32) - program.graph.input.zero_point}
    for step, read in zip(program.steps, last_reads, strict=True):
        values[step.output] = apply(step, values, products, spent)
        for name in read:
            del values[name]
    return values[program.output].astype(np.float32)


def last_readings(program: IntegerProgram) -> list[set[str]]:
    """For each step, the values that no later one reads."""
    last = {name: i for i, step in enumerate(program.steps) for name in _sources(step)}
    return [
        {name for name in _sources(step) if last[name] == i and name != program.output}
        for i, step in enumerate(program.steps)
    ]


def read_once(program: IntegerProgram) -> set[str]:
    """The values of arithmetic that a single step reads: its own result may take their place in memory.

    What moves codes about may give them under another name, in the same place: those are not among them.
    """
    arithmetic = Accumulate | AddCodes | Requantize | QuantizeReal
    readers = Counter(name for step in program.steps for name in _sources(step))
    return {
        step.output for step in program.steps if isinstance(step, arithmetic) and readers[step.output] == 1
    }


def _sources(step: Step) -> tuple[str, ...]:
    if isinstance(step, AddCodes | MultiplyCodes):
        return step.left, step.right
    return step.sources if isinstance(step, ConcatCodes) else (step.source,)


def apply(
    step: Step, values: dict[str, Array], products: Products, spent: Collection[str] = frozenset()
) -> Array:
    """What a step gives for the values before it; it may overwrite those that are `spent` with it."""
    if isinstance(step, MultiplyCodes):
        return as_codes(values[step.left]) * as_codes(values[step.right])
    if isinstance(step, AddCodes):
        return _added(step, as_codes(values[step.left]), as_codes(values[step.right]), step.left in spent)
    if isinstance(step, ShapeStep):
        return computed(step, [as_codes(values[name]) for name in _sources(step)])
    source = values[step.source]
    if isinstance(step, Accumulate):
        return _accumulated(as_codes(source), step, products)
    if isinstance(step, Requantize | QuantizeReal):
        return _quantized(step, source, step.source in spent)
    if isinstance(step, Dequantize):
        return source.astype(np.float32) * step.scale
    if isinstance(step, LookupCodes):
        return np.take(step.table, as_codes(source) - step.low)
    assert_never(step)


def _parts(value: Array) -> Iterator[slice]:
    """Its images, some at a time (`PASS_NUMBERS`)."""
    images = max(1, PASS_NUMBERS // max(1, prod(value.shape[1:])))
    return (slice(start, start + images) for start in range(0, len(value), images))


def _quantized(step: Requantize | QuantizeReal, source: Array, in_place: bool) -> Codes:
    codes = source.view(np.int32) if in_place else np.empty(source.shape, np.int32)
    for part in _parts(source):
        real = source[part].astype(np.float32)
        if isinstance(step, Requantize):
            real *= step.multiplier
        else:
            real /= step.scale
        codes[part] = clamped(real, step.low, step.high)
    return codes


def _added(step: AddCodes, left: Codes, right: Codes, in_place: bool) -> NDArray[np.float32]:
    sums = left.view(np.float32) if in_place else np.empty(left.shape, np.float32)
    for part in _parts(left):
        real = left[part].astype(np.float32)
        real *= step.left_scale
        real += right[part].astype(np.float32) * step.right_scale
        sums[part] = real
    return sums


def _accumulated(codes: Codes, step: Accumulate, products: Products) -> Codes:
    """A convolution reads features as an image of one pixel."""
    features = codes.ndim == 2 and isinstance(step.op, Conv2d)
    read = codes[:, None, None, :] if features else codes
    sums = products(read, step.weight, step.op, step.bound)
    sums += step.bias
    return sums.reshape(codes.shape) if features else sums


def as_codes(value: Array) -> Codes:
    """A value that is codes, for the type checker."""
    assert value.dtype == np.int32
    return value  # type: ignore[return-value]


def numpy_products(codes: Codes, weight: NDArray[np.int8], op: Conv2d | Linear, bound: int) -> Codes:
    """Sums of products by im2col and BLAS."""
    fan_in = weight[0].size
    greatest = int(np.abs(weight.astype(np.int16)).max(initial=0))
    carrier: type[np.floating] = np.float32 if fan_in * bound * greatest < EXACT_FLOAT32 else np.float64
    if isinstance(op, Linear):
        return (codes.astype(carrier) @ weight.T.astype(carrier)).astype(np.int32)
    columns = _columns(codes.astype(carrier), op)
    batch, height, width, groups = *columns.shape[:3], op.groups
    if groups == 1:
        flat = columns.reshape(batch * height * width, fan_in)
        sums = flat @ weight.transpose(0, 2, 3, 1).reshape(len(weight), fan_in).T.astype(carrier)
    else:
        per_group = columns.reshape(batch * height * width, *op.kernel, groups, op.in_channels // groups)
        per_group = per_group.transpose(3, 0, 1, 2, 4).reshape(groups, batch * height * width, fan_in)
        by_group = weight.transpose(0, 2, 3, 1).reshape(groups, -1, fan_in).transpose(0, 2, 1).astype(carrier)
        sums = np.matmul(per_group, by_group).transpose(1, 0, 2)
    return sums.reshape(batch, height, width, len(weight)).astype(np.int32)


def _columns(codes: NDArray[np.floating], op: Conv2d) -> NDArray[np.floating]:
    """`(N, H', W', kh, kw, C)`: the zero-padded input under each position of the kernel."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = op.kernel, op.stride, op.padding, op.dilation
    padded = np.pad(codes, ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    height = (padded.shape[1] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[2] - dw * (kw - 1) - 1) // sw + 1
    columns = np.empty((len(codes), height, width, kh, kw, codes.shape[3]), codes.dtype)
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dh, i * dh + sh * (height - 1) + 1, sh)
            cols = slice(j * dw, j * dw + sw * (width - 1) + 1, sw)
            columns[:, :, :, i, j] = padded[:, rows, cols]
    return columns
