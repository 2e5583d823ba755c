"""How the native engine walks a graph: nodes that compute in one go are one unit.

A layer, the BatchNorm behind it, the ReLU and the quantization are one unit; so are an addition, a product
or a lookup and its quantization. What is real-valued lives only inside a unit; between units there are codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedmpq.model.dropout import Dropout
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    GraphError,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Pad,
    Quantize,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.never import assert_never
from fedmpq.model.ops import ShapeOp
from fedmpq.model.pools import PoolOp, windows_of
from fedmpq.model.quantizers import bound_before, check_quantizers
from fedmpq.model.rearrangements import Rearrangement

# What the kernels count in int32: bytes of a padded image, with a bit to spare for its offsets, and sums of
# products of codes, weights (at most 127) and errors (at most 128).
_MAX_COPY = 2**30
_MAX_SUM = 2**31 - 1

LITTLE = 2 << 20
"""Bytes that are little beside the process that trains; ResNet-20 at a batch of 16 is 4 % faster by them."""


def with_spare(needed: int, little: int = LITTLE) -> int:
    """The most bytes of a step's buffers, with those that it could do without, when it needs so many."""
    return max(needed * 7 // 6, needed + little)


@dataclass(frozen=True)
class Quantizer:
    """The rounding that ends a unit."""

    name: str
    op: Quantize
    maximum: float
    """The bound of the ReLU or function before it, 0 for none."""


@dataclass(frozen=True)
class ProductUnit:
    """A layer with its BatchNorm; without a quantizer it gives the logits."""

    node: Node
    op: Conv2d | Linear
    index: int
    """Among the graph's layers: the layer number of its random numbers."""
    norm: Node | None
    quantizer: Quantizer | None
    source: str

    @property
    def output(self) -> str:
        return self.quantizer.name if self.quantizer else self.node.name

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class NormUnit:
    """A BatchNorm of codes, rounded."""

    norm: Node
    quantizer: Quantizer

    @property
    def output(self) -> str:
        return self.quantizer.name

    @property
    def source(self) -> str:
        return self.norm.inputs[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.norm.inputs


@dataclass(frozen=True)
class SumUnit:
    """An addition of codes, or codes alone, rounded anew."""

    sources: tuple[str, ...]
    quantizer: Quantizer

    @property
    def output(self) -> str:
        return self.quantizer.name


@dataclass(frozen=True)
class MulUnit:
    """A product of codes, rounded; the second factor may have a single pixel."""

    sources: tuple[str, ...]
    quantizer: Quantizer

    @property
    def output(self) -> str:
        return self.quantizer.name


@dataclass(frozen=True)
class LookupUnit:
    """A function of codes, rounded."""

    op: Lookup
    source: str
    quantizer: Quantizer

    @property
    def output(self) -> str:
        return self.quantizer.name

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class NodeUnit:
    """A node by itself: codes to codes, with nothing rounded anew behind it."""

    node: Node

    @property
    def output(self) -> str:
        return self.node.name

    @property
    def source(self) -> str:
        return self.node.inputs[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.node.inputs


@dataclass(frozen=True)
class PoolUnit(NodeUnit):
    """A pool."""

    op: PoolOp

    @property
    def takes_greatest(self) -> bool:
        """The greatest under a window, not the mean."""
        return isinstance(self.op, MaxPool)


@dataclass(frozen=True)
class FlattenUnit(NodeUnit):
    """Codes in a new order."""


@dataclass(frozen=True)
class ConcatUnit(NodeUnit):
    """Codes of several values, joined."""


@dataclass(frozen=True)
class RearrangeUnit(NodeUnit):
    """Codes in other places, or several."""

    op: Rearrangement


@dataclass(frozen=True)
class ScoreUnit:
    """Codes that are the logits themselves, such as means over an image."""

    source: str

    @property
    def output(self) -> str:
        return f"{self.source}.logits"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class DropUnit:
    """What the layer `reader` reads, some of it dropped."""

    source: str
    reader: str
    index: int
    """Of the layer among the graph's: the layer number of its random numbers."""
    dropout: Dropout

    @property
    def output(self) -> str:
        # No node is called so: names have no spaces.
        return f"{self.reader} dropped"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


ShapeUnit = PoolUnit | FlattenUnit | ConcatUnit | RearrangeUnit | DropUnit
Unit = ProductUnit | NormUnit | SumUnit | MulUnit | LookupUnit | ShapeUnit | ScoreUnit


def units_of(graph: Graph) -> tuple[Unit, ...]:
    """The graph's units in execution order; a graph they cannot express is refused."""
    check_quantizers(graph)
    last = graph.by_name[graph.output]
    scores = graph.kinds[last.name] == "codes"
    if not scores and not isinstance(last.op, Linear):
        raise GraphError(
            f"the logits come out of {last.name!r} ({type(last.op).__name__}); the native engine needs a"
            " linear layer last, or codes (or use the torch engine)"
        )
    found = [unit for node in graph.nodes for unit in (_dropped(graph, node), _unit_of(graph, node))]
    return tuple(unit for unit in (*found, ScoreUnit(last.name) if scores else None) if unit is not None)


def unlearnt_values(graph: Graph, units: Sequence[Unit]) -> set[str]:
    """The values of units that have no errors; the last, which has the loss, always has."""
    found = set(graph.unlearnt)
    found |= {unit.output for unit in units if isinstance(unit, DropUnit) and unit.source in found}
    return found - {units[-1].output}


def _dropped(graph: Graph, node: Node) -> DropUnit | None:
    """The unit that drops some of what `node` reads."""
    if node.dropout is None:
        return None
    return DropUnit(node.inputs[0], node.name, graph.layers.index(node), node.dropout)


def _unit_of(graph: Graph, node: Node) -> Unit | None:
    """The unit that begins with `node`; None for a node in the middle of one."""
    op = node.op
    if isinstance(op, Conv2d | Linear):
        return _product(graph, node, op)
    if isinstance(op, Add):
        return SumUnit(node.inputs, _the_quantizer(graph, node))
    if isinstance(op, Mul):
        return MulUnit(node.inputs, _the_quantizer(graph, node))
    if isinstance(op, Lookup):
        return LookupUnit(op, node.inputs[0], _the_quantizer(graph, node))
    if isinstance(op, ShapeOp):
        return _shape_unit(graph, node, op)
    if isinstance(op, Relu):
        alone = graph.kinds[node.inputs[0]] == "codes"
        return SumUnit(node.inputs, _the_quantizer(graph, node)) if alone else None
    if isinstance(op, BatchNorm):
        return None if graph.folds(node) else NormUnit(node, _the_quantizer(graph, node))
    if isinstance(op, Quantize):
        return None
    assert_never(op)


def _shape_unit(graph: Graph, node: Node, op: ShapeOp) -> ShapeUnit:
    if isinstance(op, MaxPool | AvgPool | GlobalAvgPool | AdaptiveAvgPool):
        _check_pool(graph, node, op)
        return PoolUnit(node, op)
    if isinstance(op, Concat):
        return ConcatUnit(node)
    if isinstance(op, Slice | ChannelShuffle | Pad | Upsample):
        return RearrangeUnit(node, op)
    if isinstance(op, Flatten):
        return FlattenUnit(node)
    assert_never(op)


def _product(graph: Graph, node: Node, op: Conv2d | Linear) -> ProductUnit:
    if isinstance(op, Conv2d):
        _check_size(graph, node, op)
    readers = [graph.by_name[name] for name in graph.consumers[node.name]]
    norm = readers[0] if readers and isinstance(readers[0].op, BatchNorm) else None
    quantizer = None if node.name == graph.output else _the_quantizer(graph, norm or node)
    dropped = _dropped(graph, node)
    source = node.inputs[0] if dropped is None else dropped.output
    return ProductUnit(node, op, graph.layers.index(node), norm, quantizer, source)


def _check_size(graph: Graph, node: Node, op: Conv2d) -> None:
    """Refuse what the kernels' counters cannot hold."""
    _, height, width = graph.shapes[node.inputs[0]]
    spans = (d * (k - 1) for d, k in zip(op.dilation, op.kernel, strict=True))
    rows, columns = (
        size + 2 * p + span + 4 * min(s, size + 2 * p)
        for size, p, span, s in zip((height, width), op.padding, spans, op.stride, strict=True)
    )
    if rows * columns * (max(op.in_channels, op.out_channels) + 3) > _MAX_COPY:
        raise GraphError(
            f"node {node.name!r} pads {height} x {width} pixels to about {rows} x {columns}, too many for the"
            " native engine: use less padding, dilation or stride, or smaller images"
        )
    met = _outputs_met(op)
    if met > (most := _MAX_SUM // (127 * 128)):
        raise GraphError(
            f"node {node.name!r} has {met} products of errors for each pixel; the native engine adds up at"
            f" most {most}: use fewer output channels, a smaller kernel, or the torch engine"
        )
    pixels = math.prod(graph.shapes[node.name][1:])
    greatest = _MAX_SUM // (128 * _greatest_byte(graph, node.inputs[0]))
    if pixels > greatest:
        raise GraphError(
            f"node {node.name!r} has {pixels} output pixels; the native engine adds up at most {greatest}:"
            " use smaller images, or the torch engine"
        )


def _outputs_met(op: Conv2d) -> int:
    """How many products of errors and weights are the error of one input pixel, at most.

    With a stride a pixel meets a part of the kernel's taps, unless there is dilation too.
    """
    taps = (-(-k // s) if d == 1 else k for k, s, d in zip(op.kernel, op.stride, op.dilation, strict=True))
    return math.prod(taps) * (op.out_channels // op.groups)


def _check_pool(graph: Graph, node: Node, op: PoolOp) -> None:
    """Refuse a mean of more codes than an int32 sum holds."""
    covered = windows_of(op, graph.shapes[node.inputs[0]]).most_covered
    if not isinstance(op, MaxPool) and covered > (most := _MAX_SUM // 255):
        raise GraphError(
            f"node {node.name!r} averages {covered} pixels; the native engine adds up at most {most}:"
            " use smaller images, or the torch engine"
        )


def _greatest_byte(graph: Graph, name: str) -> int:
    """The greatest stored code of `name`: two 4-bit ones share a byte; the image, averages and joined codes
    have 8 bits."""
    handing_on = MaxPool | Flatten | Slice | ChannelShuffle | Pad | Upsample
    while name != INPUT and isinstance(graph.by_name[name].op, handing_on):
        name = graph.by_name[name].inputs[0]
    op = None if name == INPUT else graph.by_name[name].op
    return 15 if isinstance(op, Quantize) and op.bits <= 4 else 255


def _the_quantizer(graph: Graph, node: Node) -> Quantizer:
    """The one quantizer behind a real value, maybe through a ReLU."""
    readers = [graph.by_name[name] for name in graph.consumers[node.name]]
    for reader in readers[:]:
        if isinstance(reader.op, Relu) and not isinstance(node.op, Relu):
            readers += [graph.by_name[name] for name in graph.consumers[reader.name]]
    found = [
        Quantizer(reader.name, reader.op, bound_before(graph, reader))
        for reader in readers
        if isinstance(reader.op, Quantize)
    ]
    if len(found) != 1:
        raise GraphError(
            f"the value of {node.name!r} is rounded {len(found)} times; the native engine needs it rounded"
            " exactly once (let the branches share one ReLU, or use the torch engine)"
        )
    source = graph.by_name[graph.by_name[found[0].name].inputs[0]]
    if found[0].op.signed and isinstance(source.op, Relu):
        raise GraphError(f"{found[0].name!r} quantizes a ReLU's output with a sign; make it unsigned")
    return found[0]
