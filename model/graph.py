"""The graph of a model: which operations, on what, in which order; no weights.

A `Graph` that exists is valid: it checks itself when made, and `from_bytes` raises `GraphError` and nothing
else on whatever bytes it gets. `graph.proto`, beside its stubs, documents every field.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from fedmpq.model import graph_wire
from fedmpq.model.dropout import Dropout
from fedmpq.model.ops import (
    MAX_DIMENSION,
    RULES,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    GraphError,
    Kind,
    Layer,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Op,
    Pad,
    Quantize,
    Relu,
    Shape,
    Size,
    Slice,
    Upsample,
    check_elements,
    check_float32,
    check_range,
)
from fedmpq.model.task import CLASSIFICATION, TASKS, Task
from fedmpq.proto import graph_pb2

__all__ = [
    "INPUT",
    "AdaptiveAvgPool",
    "Add",
    "AvgPool",
    "BatchNorm",
    "ChannelShuffle",
    "Concat",
    "Conv2d",
    "Flatten",
    "GlobalAvgPool",
    "Graph",
    "GraphError",
    "Input",
    "Kind",
    "Layer",
    "Linear",
    "Lookup",
    "MaxPool",
    "Mul",
    "Node",
    "Op",
    "Pad",
    "Quantize",
    "Relu",
    "Shape",
    "Size",
    "Slice",
    "Upsample",
]

_LEARNT_PARTS = ("weight", "bias")
INPUT = "input"
"""The reserved name of the image tensor."""

MAX_NODES = 4096
# A node takes at most its name, two inputs and some 70 bytes; the inputs of concatenations come on top, about
# 100 kB of them in the longest DenseNet.
MAX_BYTES = 3 * 2**20
# No slashes, blanks or control characters: names end up in file names, logs and web pages.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True)
class Input:
    """The image: codes `a` in 0..255 that stand for `scale * (a - zero_point)`; padding is real 0."""

    channels: int
    height: int
    width: int
    scale: float
    zero_point: int

    @property
    def shape(self) -> Shape:
        return (self.channels, self.height, self.width)


@dataclass(frozen=True)
class Node:
    """An operation, its name, and the names of what it reads."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    frozen: bool = False
    """Training leaves its parameters as they are: those of a layer or a BatchNorm."""
    dropout: Dropout | None = None
    """What training drops of the codes that a layer reads."""


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order; the last is the output, and every other one is read by a later one."""

    name: str
    input: Input
    nodes: tuple[Node, ...]
    output: str
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        _check_name("graph name", self.name)
        _check_input(self.input)
        check_range("the number of nodes", len(self.nodes), 1, MAX_NODES)
        self._check_order()
        self._check_values()
        self._check_output()
        for node in self.nodes:
            if node.frozen and not isinstance(node.op, Conv2d | Linear | BatchNorm):
                raise GraphError(f"node {node.name!r} is frozen and has no parameters: only layers have")
            _check_dropout(node)

    @cached_property
    def layers(self) -> tuple[Node, ...]:
        """The nodes with quantized weights, in execution order: the order of every bit-width vector."""
        return tuple(node for node in self.nodes if isinstance(node.op, Conv2d | Linear))

    @cached_property
    def frozen_layers(self) -> frozenset[str]:
        """The layers whose weights training leaves as they are."""
        return frozenset(node.name for node in self.layers if node.frozen)

    @cached_property
    def frozen_side(self) -> frozenset[str]:
        """The side tensors that training leaves as they are: learnt ones of frozen nodes, and the clips of
        what frozen nodes alone have made."""
        frozen = {node.name for node in self.nodes if node.frozen}
        held = {node.name for node in self.nodes if isinstance(node.op, Quantize)} & self.unlearnt
        return frozenset(
            name
            for name in self.side_shapes()
            if (name.rpartition(".")[0] in frozen and name.rpartition(".")[2] in _LEARNT_PARTS)
            or name.rpartition(".")[0] in held
        )

    @cached_property
    def unlearnt(self) -> frozenset[str]:
        """The values that nothing has a part in that training changes, the image included: it computes no
        errors of them. They are what frozen nodes alone make of the image, and what has no parameters."""
        fixed = {INPUT}
        behind_frozen: set[str] = set()
        for node in self.nodes:
            if node.frozen or not behind_frozen.isdisjoint(node.inputs):
                behind_frozen.add(node.name)
            if isinstance(node.op, Quantize):
                # A clip is learnt with what is before it; by itself, where there is nothing to learn with.
                learns = node.name not in behind_frozen
            else:
                learns = isinstance(node.op, Layer | BatchNorm) and not node.frozen
            if not learns and fixed.issuperset(node.inputs):
                fixed.add(node.name)
        return frozenset(fixed)

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """Number of weights of each layer."""
        return tuple(math.prod(self.weight_shape(node.name)) for node in self.layers)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shape of one sample of every value, the image included."""
        shapes = {INPUT: self.input.shape}
        for node in self.nodes:
            shapes[node.name] = _shape_of(node, [shapes[name] for name in node.inputs])
        return shapes

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Whether each value is codes or real."""
        kinds: dict[str, Kind] = {INPUT: "codes"}
        for node in self.nodes:
            kinds[node.name] = RULES[type(node.op)].gives or kinds[node.inputs[0]]
        return kinds

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """For every value, the image included, the nodes that read it, each once, in execution order."""
        consumers: dict[str, list[str]] = {INPUT: [], **{node.name: [] for node in self.nodes}}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                consumers[name].append(node.name)
        return {name: tuple(readers) for name, readers in consumers.items()}

    def folds(self, node: Node) -> bool:
        """Whether a BatchNorm melts into a layer: it reads one directly, and nothing else reads that."""
        source = self.by_name.get(node.inputs[0])
        return (
            source is not None
            and isinstance(source.op, Conv2d | Linear)
            and self.consumers[source.name] == (node.name,)
        )

    def reads(self, node: Node) -> Kind | None:
        """The kind that the inputs of `node` must have to run; None for either.

        A BatchNorm that melts into no layer reads codes.
        """
        if isinstance(node.op, BatchNorm):
            return "real" if self.folds(node) else "codes"
        return RULES[type(node.op)].reads

    def weight_shape(self, name: str) -> Shape:
        """Shape of the weight of the layer called `name`."""
        node = self.by_name.get(name)
        if node is None or not isinstance(node.op, Conv2d | Linear):
            raise GraphError(f"{name!r} is no layer of {self.name!r}; see graph.layers for those that are")
        return node.op.weight_shape

    def side_shapes(self) -> dict[str, Shape]:
        """Name and shape of every side tensor: biases, BatchNorm's four, clips."""
        return dict(self._side_shapes)

    @cached_property
    def _side_shapes(self) -> dict[str, Shape]:
        return {
            f"{node.name}.{part}": shape
            for node in self.nodes
            for part, shape in RULES[type(node.op)].side(node.op).items()
        }

    @cached_property
    def id(self) -> str:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The one encoding of this graph (message `fedmpq.v1.Graph`)."""
        message = graph_pb2.Graph(
            format_version=graph_wire.version_of(any(node.frozen for node in self.nodes), self.task),
            name=self.name,
            input=graph_pb2.Input(
                channels=self.input.channels,
                height=self.input.height,
                width=self.input.width,
                scale=self.input.scale,
                zero_point=self.input.zero_point,
            ),
            output=self.output,
            task=self.task.upper(),
        )
        for node in self.nodes:
            added = message.nodes.add(name=node.name, inputs=node.inputs, frozen=node.frozen)
            graph_wire.write_op(node.op, added)
            if node.dropout is not None:
                added.dropout.rate = node.dropout.rate
                added.dropout.whole_channels = node.dropout.whole_channels
        return message.SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Graph:
        """The graph these bytes encode; `GraphError` on any others."""
        if len(data) > MAX_BYTES:
            raise GraphError(f"{len(data)} bytes are too many for a graph, at most {MAX_BYTES} are allowed")
        try:
            message = graph_pb2.Graph.FromString(data)
        # protobuf's pure Python implementation lets text that is not UTF-8 through as a ValueError.
        except (DecodeError, ValueError) as error:
            raise GraphError(f"{len(data)} bytes are no graph: {error}") from None
        if message.format_version not in graph_wire.FORMAT_VERSIONS:
            raise GraphError(
                f"the graph has format version {message.format_version}, this fedmpq reads"
                f" {' and '.join(map(str, graph_wire.FORMAT_VERSIONS))}: update the older side"
            )
        check_range("the number of nodes", len(message.nodes), 1, MAX_NODES)
        image = message.input
        graph = cls(
            name=message.name,
            input=Input(image.channels, image.height, image.width, image.scale, image.zero_point),
            nodes=tuple(
                Node(
                    each.name,
                    graph_wire.read_op(each),
                    tuple(each.inputs),
                    each.frozen,
                    graph_wire.read_dropout(each),
                )
                for each in message.nodes
            ),
            output=message.output,
            task=graph_wire.read_task(message.task),
        )
        if graph.to_bytes() != data:
            raise GraphError(
                f"the graph {graph.name!r} is not in its one encoding: it has fields unknown to format"
                f" version {message.format_version} or was not written by to_bytes; update the older side"
            )
        return graph

    def _check_order(self) -> None:
        defined = {INPUT}
        for node in self.nodes:
            _check_name("node name", node.name)
            if node.name in defined:
                reserved = " (reserved for the image)" if node.name == INPUT else ""
                raise GraphError(f"the name {node.name!r} is taken{reserved}: rename the second node")
            if undefined := [name for name in node.inputs if name not in defined]:
                raise GraphError(
                    f"node {node.name!r} reads {undefined[0][:128]!r}, which no node before it gives"
                )
            defined.add(node.name)

    def _check_values(self) -> None:
        # Computing the shapes is what checks every op.
        shapes = self.shapes
        for node in self.nodes:
            check_elements(f"output of node {node.name!r}", shapes[node.name])
            if isinstance(node.op, Quantize) and self.kinds[node.inputs[0]] == "codes":
                raise GraphError(f"node {node.name!r} (Quantize) reads codes, needs real values: remove it")

    def _check_output(self) -> None:
        for node in self.nodes:
            if not self.consumers[node.name] and node.name != self.output:
                raise GraphError(f"node {node.name!r} is read by none and is not the output: remove it")
        if self.output not in self.by_name:
            raise GraphError(f"the output {self.output[:128]!r} is no node")
        if not self.layers:
            raise GraphError(f"the graph {self.name!r} has no layer to train: end it with a linear layer")
        if len(self.shapes[self.output]) != 1:
            raise GraphError(
                f"the output {self.output!r} has shape {self.shapes[self.output]}, needs (classes,):"
                " end the model with a linear layer"
            )
        self._check_task()

    def _check_task(self) -> None:
        if self.task not in TASKS:
            raise GraphError(f"the task {self.task!r} is none of {', '.join(TASKS)}")
        outputs, values = self.shapes[self.output][0], math.prod(self.input.shape)
        if self.task == "reconstruction" and outputs != values:
            raise GraphError(
                f"the output {self.output!r} has {outputs} values, the input {values}: a model that"
                " reconstructs its input ends with as many outputs as it has inputs"
            )


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise GraphError(
            f"the {what} {name[:40]!r} must be 1..128 ASCII letters, digits or '_.:-', not first '.:-'"
        )


def _check_input(image: Input) -> None:
    for what, value in (("channels", image.channels), ("height", image.height), ("width", image.width)):
        check_range(f"input {what}", value, 1, MAX_DIMENSION)
    check_elements("input", image.shape)
    check_float32("input scale", image.scale, zero_allowed=False)
    check_range("input zero_point", image.zero_point, 0, 255)


def _check_dropout(node: Node) -> None:
    if node.dropout is None:
        return
    if not isinstance(node.op, Conv2d if node.dropout.whole_channels else Conv2d | Linear):
        whole = "whole channels of " if node.dropout.whole_channels else ""
        raise GraphError(
            f"node {node.name!r} ({type(node.op).__name__}) drops {whole}what it reads: only layers do"
        )
    try:
        node.dropout.check()
    except GraphError as error:
        raise GraphError(f"node {node.name!r}: {error}") from None


def _shape_of(node: Node, inputs: list[Shape]) -> Shape:
    """Output shape of `node`; every complaint about its op starts with its name."""
    rule, kind = RULES[type(node.op)], type(node.op).__name__
    if rule.arity is not None and len(inputs) != rule.arity:
        raise GraphError(f"node {node.name!r} ({kind}) has {len(inputs)} inputs, needs {rule.arity}")
    try:
        return rule.shape(node.op, *inputs)
    except GraphError as error:
        raise GraphError(f"node {node.name!r} ({kind}): {error}") from None
