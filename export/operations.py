"""What the built-in targets lower: the integer program with each layer's rounding joined to its sums.

A layer is `code = clamp(rint(float(bias + sum codes * weight) * multiplier), low, high)`, which is what the
runtimes' integer convolutions compute when every scale but the weights' is 1. Multipliers are positive here:
where BatchNorm's is negative, the channel's weights and bias change their sign with it. The product is the
same float32, and XNNPACK loads no negative ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.code_products import MultiplyCodes
from fedmpq.model.graph import BatchNorm, Conv2d, Graph, Linear
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.integer_program import (
    Accumulate,
    AddCodes,
    Dequantize,
    IntegerProgram,
    QuantizeReal,
    Requantize,
)
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.quantized import QuantizedLayer, identity_layer
from fedmpq.model.shape_steps import ConcatCodes, FlattenCodes, PoolAverage, PoolMax, Rearrange


@dataclass(frozen=True)
class Sums:
    """`bias + sum codes * weight`; `codes` are the weight's own, `bits` wide, as `model.grid` maps them."""

    layer: str
    source: str
    op: Conv2d | Linear
    codes: NDArray[np.uint8]
    bits: int
    bias: NDArray[np.int32]


@dataclass(frozen=True)
class RoundedLayer:
    """`code = clamp(rint(float(sums) * multiplier), low, high)`, one multiplier per output channel."""

    output: str
    sums: Sums
    multiplier: NDArray[np.float32]
    low: int
    high: int


@dataclass(frozen=True)
class RealLayer:
    """`real = float(sums) * scale`: the logits."""

    output: str
    sums: Sums
    scale: NDArray[np.float32]


@dataclass(frozen=True)
class RoundedProduct:
    """`code = clamp(rint(float(left * right) * multiplier), low, high)`, as `MultiplyCodes` multiplies."""

    output: str
    left: str
    right: str
    multiplier: np.float32
    low: int
    high: int


OperationOfOne = (
    RoundedLayer
    | RealLayer
    | Requantize
    | Dequantize
    | QuantizeReal
    | PoolMax
    | PoolAverage
    | FlattenCodes
    | Rearrange
    | LookupCodes
)
"""Reads one value; a `Dequantize` here reads codes, which are the logits."""
Operation = OperationOfOne | AddCodes | ConcatCodes | RoundedProduct


def operations(program: IntegerProgram, layers: Mapping[str, QuantizedLayer]) -> Iterator[Operation]:
    """The program's steps in order; accumulators and products vanish into whatever reads them."""
    accumulators: dict[str, Accumulate] = {}
    products: dict[str, MultiplyCodes] = {}
    for step in program.steps:
        if isinstance(step, Accumulate):
            accumulators[step.output] = step
        elif isinstance(step, MultiplyCodes):
            products[step.output] = step
        elif isinstance(step, Dequantize) and step.source in accumulators:
            sums, scale = _positive(program.graph, layers, accumulators[step.source], step.scale)
            yield RealLayer(step.output, sums, scale)
        elif isinstance(step, Requantize) and step.source in accumulators:
            sums, multiplier = _positive(program.graph, layers, accumulators[step.source], step.multiplier)
            yield RoundedLayer(step.output, sums, multiplier, step.low, step.high)
        elif isinstance(step, Requantize) and step.source in products:
            factors = products[step.source]
            one = np.float32(step.multiplier)
            yield RoundedProduct(step.output, factors.left, factors.right, one, step.low, step.high)
        else:
            yield step


def layer_of(graph: Graph, accumulator: str) -> str:
    """The layer that an accumulator is of: it bears the name of the BatchNorm folded into it, if any.

    A BatchNorm that reads codes is its own, an `identity_layer`.
    """
    node = graph.by_name[accumulator]
    return node.inputs[0] if isinstance(node.op, BatchNorm) and graph.folds(node) else node.name


def _positive(
    graph: Graph, layers: Mapping[str, QuantizedLayer], step: Accumulate, scale: NDArray[np.float32]
) -> tuple[Sums, NDArray[np.float32]]:
    name = layer_of(graph, step.output)
    layer = layers[name] if name in layers else identity_layer(len(scale))
    negative = scale < 0
    codes = layer.codes.copy()
    codes[negative] = mirrored(layer.codes[negative], layer.bits)
    bias = np.where(negative, -step.bias, step.bias).astype(np.int32)
    return Sums(name, step.source, step.op, codes, layer.bits, bias), np.abs(scale)


def mirrored(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The codes of the negated weights: `2^bits - 1 - code`; at 8 bits, where 0 is unused, `256 - code`."""
    top = 256 if bits == MAX_BITS else 2**bits - 1
    return (top - codes.astype(np.int16)).astype(np.uint8)
