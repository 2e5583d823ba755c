"""Graphs: shapes, validation, the one encoding, hostile bytes."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model import graph_wire
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
    Input,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Op,
    Pad,
    Quantize,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.ops import RULES
from fedmpq.proto import graph_pb2

IMAGE = Input(channels=3, height=9, width=7, scale=0.015625, zero_point=128)


def conv(in_channels: int, out_channels: int, **changes: Any) -> Conv2d:
    plain = Conv2d(in_channels, out_channels, (3, 3), (1, 1), (1, 1), (1, 1), groups=1, bias=False)
    return replace(plain, **changes)


def every_op() -> Graph:
    """A small network with every operation in it."""
    nodes = (
        Node("stem", conv(3, 8, stride=(2, 1), bias=True), (INPUT,)),
        Node("stem_norm", BatchNorm(8, 1e-5, 0.1), ("stem",)),
        Node("relu", Relu(6.0), ("stem_norm",)),
        Node("relu.quantized", Quantize(4, signed=False), ("relu",)),
        Node("block.conv", conv(8, 8, groups=8), ("relu.quantized",)),
        Node("block.conv.quantized", Quantize(8, signed=True), ("block.conv",)),
        Node("add", Add(), ("block.conv.quantized", "relu.quantized")),
        Node("add.quantized", Quantize(8, signed=True), ("add",)),
        Node("silu", Lookup("silu", 0.0), ("add.quantized",)),
        Node("silu.quantized", Quantize(8, signed=True), ("silu",)),
        Node("silu_gate", GlobalAvgPool(), ("silu.quantized",)),
        Node("silu_mul", Mul(), ("silu.quantized", "silu_gate")),
        Node("silu_mul.quantized", Quantize(8, signed=True), ("silu_mul",)),
        Node("max_pool", MaxPool((2, 2), (1, 2), (1, 0)), ("silu_mul.quantized",)),
        Node("avg_pool", AvgPool((3, 1), (2, 1), (0, 0)), ("max_pool",)),
        Node("concat", Concat(), ("avg_pool", "avg_pool", "avg_pool")),
        Node("slice", Slice(2, 10), ("concat",)),
        Node("shuffle", ChannelShuffle(4), ("slice",)),
        Node("pad", Pad((0, 1), (2, 0)), ("shuffle",)),
        Node("upsample", Upsample((1, 3)), ("pad",)),
        Node("adaptive", AdaptiveAvgPool((3, 5)), ("upsample",)),
        Node("mean", GlobalAvgPool(), ("adaptive",)),
        Node("flatten", Flatten(), ("mean",)),
        Node("fc", Linear(8, 10, bias=True), ("flatten",)),
    )
    return Graph("every_op", IMAGE, nodes, "fc")


def with_node(graph: Graph, which: str, /, **changes: Any) -> Graph:
    nodes = tuple(replace(node, **changes) if node.name == which else node for node in graph.nodes)
    return replace(graph, nodes=nodes)


def with_op(graph: Graph, which: str, /, **changes: Any) -> Graph:
    return with_node(graph, which, op=replace(graph.by_name[which].op, **changes))


def test_the_example_has_every_op() -> None:
    assert {type(node.op) for node in every_op().nodes} == set(RULES)


def test_shapes() -> None:
    shapes = every_op().shapes
    assert shapes[INPUT] == (3, 9, 7)
    assert shapes["stem"] == shapes["add"] == (8, 5, 7)
    assert shapes["max_pool"] == (8, 6, 3)
    assert shapes["avg_pool"] == (8, 2, 3)
    assert shapes["concat"] == (24, 2, 3)
    assert shapes["slice"] == shapes["shuffle"] == (8, 2, 3)
    assert shapes["pad"] == (8, 4, 4)
    assert shapes["upsample"] == (8, 4, 12)
    assert shapes["adaptive"] == (8, 3, 5)
    assert shapes["mean"] == (8, 1, 1)
    assert shapes["flatten"] == (8,)
    assert shapes["fc"] == (10,)


def test_layers_and_side_tensors() -> None:
    graph = every_op()
    assert [node.name for node in graph.layers] == ["stem", "block.conv", "fc"]
    assert graph.weight_shape("block.conv") == (8, 1, 3, 3)
    assert graph.layer_sizes == (8 * 3 * 9, 8 * 9, 80)
    assert graph.side_shapes() == {
        "stem.bias": (8,),
        "stem_norm.weight": (8,),
        "stem_norm.bias": (8,),
        "stem_norm.running_mean": (8,),
        "stem_norm.running_var": (8,),
        "relu.quantized.clip": (),
        "block.conv.quantized.clip": (),
        "add.quantized.clip": (),
        "silu.quantized.clip": (),
        "silu_mul.quantized.clip": (),
        "fc.bias": (10,),
    }
    with pytest.raises(GraphError, match="'relu' is no layer"):
        graph.weight_shape("relu")


def test_kinds_and_consumers() -> None:
    graph = every_op()
    assert graph.consumers["relu.quantized"] == ("block.conv", "add")
    assert graph.consumers["fc"] == ()
    codes = {name for name, kind in graph.kinds.items() if kind == "codes"}
    quantized = {"relu.quantized", "block.conv.quantized", "add.quantized"}
    quantized |= {"silu.quantized", "silu_gate", "silu_mul.quantized"}
    moved = {"concat", "slice", "shuffle", "pad", "upsample"}
    assert codes == {INPUT, "max_pool", "avg_pool", "adaptive", "mean", "flatten"} | moved | quantized


def test_a_value_added_to_itself_has_one_consumer() -> None:
    nodes = (
        Node("flatten", Flatten(), (INPUT,)),
        Node("fc", Linear(189, 4, bias=False), ("flatten",)),
        Node("double", Add(), ("fc", "fc")),
    )
    assert Graph("twice", IMAGE, nodes, "double").consumers["fc"] == ("double",)


def chain(*ops: Op) -> Graph:
    nodes = [Node(f"n{i}", op, (f"n{i - 1}" if i else INPUT,)) for i, op in enumerate(ops)]
    return Graph("chain", IMAGE, tuple(nodes), nodes[-1].name)


def tail(channels: int) -> tuple[Op, ...]:
    return (GlobalAvgPool(), Flatten(), Linear(channels, 2, bias=False))


def graph_with_inputs(*inputs: str) -> Graph:
    return with_node(every_op(), "add", inputs=inputs)


BROKEN: dict[str, tuple[Any, str]] = {
    "taken name": (lambda: with_node(every_op(), "relu", name="stem"), "'stem' is taken"),
    "reserved name": (lambda: with_node(every_op(), "stem", name=INPUT), "reserved for the image"),
    "control character": (lambda: with_node(every_op(), "stem", name="a\nb"), "ASCII letters"),
    "path as a name": (lambda: replace(every_op(), name="../up"), "graph name"),
    "long name": (lambda: replace(every_op(), name="x" * 129), "1..128"),
    "read before given": (lambda: with_node(every_op(), "stem", inputs=("fc",)), "'stem' reads 'fc'"),
    "no such value": (lambda: graph_with_inputs("relu.quantized", "elsewhere"), "'elsewhere'"),
    "arity of add": (lambda: graph_with_inputs("relu.quantized"), r"'add' \(Add\) has 1 inputs, needs 2"),
    "no input": (lambda: with_node(every_op(), "relu", inputs=()), "has 0 inputs, needs 1"),
    "unequal addends": (lambda: graph_with_inputs("relu.quantized", INPUT), "must be equal"),
    "channels": (lambda: with_op(every_op(), "stem", in_channels=4), "in_channels is 4.* 3 channels"),
    "groups": (lambda: with_op(every_op(), "block.conv", groups=3), "groups 3 must divide 8"),
    "zero groups": (lambda: with_op(every_op(), "block.conv", groups=0), "groups is 0"),
    "zero stride": (lambda: with_op(every_op(), "stem", stride=(1, 0)), "stride width is 0"),
    "zero kernel": (lambda: with_op(every_op(), "stem", kernel=(0, 1)), "kernel height is 0"),
    "kernel too large": (lambda: with_op(every_op(), "stem", kernel=(12, 3)), "12 does not fit 9"),
    "dilated too far": (lambda: with_op(every_op(), "stem", dilation=(1, 5)), "11 does not fit 7"),
    "pool padding": (lambda: with_op(every_op(), "max_pool", padding=(2, 0)), r"padding .* within 0\.\.1"),
    "features": (lambda: with_op(every_op(), "fc", in_features=9), r"reads shape \(8,\), needs \(9,\)"),
    "linear on an image": (lambda: chain(Linear(189, 2, bias=False)), "flatten first"),
    "conv on a row": (lambda: chain(Flatten(), conv(189, 2)), "needs an image"),
    "norm channels": (lambda: with_op(every_op(), "stem_norm", channels=7), "channels is 7"),
    "norm eps": (lambda: with_op(every_op(), "stem_norm", eps=0.0), "eps is 0.0"),
    "norm eps nan": (lambda: with_op(every_op(), "stem_norm", eps=float("nan")), "eps is nan"),
    "norm momentum": (lambda: with_op(every_op(), "stem_norm", momentum=1.5), "momentum is 1.5"),
    "relu below 0": (lambda: with_op(every_op(), "relu", maximum=-1.0), "maximum is -1.0"),
    "relu minus 0": (lambda: with_op(every_op(), "relu", maximum=-0.0), "maximum is -0.0"),
    "relu infinite": (lambda: with_op(every_op(), "relu", maximum=float("inf")), "maximum is inf"),
    "relu not a float32": (lambda: with_op(every_op(), "relu", maximum=0.1), "float32"),
    "relu beyond float32": (lambda: with_op(every_op(), "relu", maximum=1e300), "float32"),
    "unknown function": (lambda: with_op(every_op(), "silu", function="swish"), "take hardswish, .*, elu"),
    "parameter of none": (lambda: with_op(every_op(), "silu", parameter=0.5), "silu has none"),
    "parameter minus 0": (lambda: with_op(every_op(), "silu", parameter=-0.0), "silu has none"),
    "slope below 0": (
        lambda: with_op(every_op(), "silu", function="leaky_relu", parameter=-0.5),
        "the negative_slope is -0.5",
    ),
    "alpha not a float32": (
        lambda: with_op(every_op(), "silu", function="elu", parameter=0.1),
        "the alpha is 0.1, must be a positive float32",
    ),
    "factors": (
        lambda: with_node(every_op(), "silu_mul", inputs=("silu.quantized", INPUT)),
        r"multiplies shapes \(8, 5, 7\) and \(3, 9, 7\)",
    ),
    "factors the other way round": (
        lambda: with_node(every_op(), "silu_mul", inputs=("silu_gate", "silu.quantized")),
        "the second must be equal or one pixel",
    ),
    "no bits": (lambda: with_op(every_op(), "relu.quantized", bits=0), r"bits is 0, must be within 1\.\.8"),
    "nine bits": (lambda: with_op(every_op(), "relu.quantized", bits=9), "bits is 9"),
    "one bit with a sign": (lambda: with_op(every_op(), "add.quantized", bits=1), r"bits is 1.* 2\.\.8"),
    "codes quantized": (lambda: chain(Quantize(8, signed=True), *tail(3)), "reads codes"),
    "output unknown": (lambda: replace(every_op(), output="nothing"), "'fc' is read by none"),
    "output an image": (lambda: chain(conv(3, 2)), r"needs \(classes,\)"),
    "output codes": (lambda: chain(Flatten()), "has no layer"),
    "output within": (lambda: replace(every_op(), output="flatten"), "'fc' is read by none"),
    "empty": (lambda: Graph("empty", IMAGE, (), INPUT), "number of nodes is 0"),
    "too many nodes": (lambda: chain(*[Relu(0.0)] * 4094, *tail(3)), "number of nodes is 4097"),
    "dimension": (lambda: chain(conv(3, 65537), *tail(65537)), "out_channels is 65537"),
    "weights": (lambda: chain(conv(3, 65536, kernel=(37, 37), padding=(99, 99)), *tail(65536)), "269156352"),
    "fan-in": (lambda: chain(conv(3, 1, kernel=(150, 150), padding=(99, 99)), *tail(1)), "fan-in is 67500"),
    "output too large": (lambda: chain(conv(3, 65536, padding=(99, 99)), *tail(65536)), "elements"),
    "image width": (lambda: replace(every_op(), input=replace(IMAGE, width=0)), "input width is 0"),
    "image size": (lambda: replace(every_op(), input=Input(2, 65536, 65536, 1.0, 0)), "elements"),
    "image scale": (lambda: replace(every_op(), input=replace(IMAGE, scale=0.0)), "input scale is 0.0"),
    "image zero point": (
        lambda: replace(every_op(), input=replace(IMAGE, zero_point=256)),
        "zero_point is 256",
    ),
    "one joined": (lambda: with_node(every_op(), "concat", inputs=("avg_pool",)), "number of inputs is 1"),
    "joined sizes": (
        lambda: with_node(every_op(), "concat", inputs=("avg_pool", "max_pool")),
        r"joins images of \(2, 3\) and \(6, 3\) pixels",
    ),
    "slice beyond": (lambda: with_op(every_op(), "slice", stop=25), r"slice of 24 channels is 25"),
    "empty slice": (
        lambda: with_op(every_op(), "slice", start=10),
        r"start of a slice that ends at 10 is 10",
    ),
    "uneven shuffle": (lambda: with_op(every_op(), "shuffle", groups=3), "groups 3 must divide 8 channels"),
    "factor": (lambda: with_op(every_op(), "upsample", factor=(0, 1)), "factor height is 0"),
    "no adaptive size": (lambda: with_op(every_op(), "adaptive", size=(3, 0)), "size width is 0"),
    "norm of a shared layer": (
        lambda: with_node(every_op(), "relu", inputs=("stem",)),
        "'stem_norm' is read by none",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_graphs_are_refused(case: str) -> None:
    make, message = BROKEN[case]
    with pytest.raises(GraphError, match=message):
        make()


def test_a_norm_that_is_not_the_only_reader_of_its_layer_reads_codes() -> None:
    nodes = (
        Node("conv", conv(3, 4), (INPUT,)),
        Node("norm", BatchNorm(4, 1e-5, 0.1), ("conv",)),
        Node("add", Add(), ("conv", "norm")),
        *(Node(f"n{i}", op, (f"n{i - 1}" if i else "add",)) for i, op in enumerate(tail(4))),
    )
    graph = Graph("shared", IMAGE, nodes, "n2")
    assert graph.reads(graph.by_name["norm"]) == "codes"
    assert every_op().reads(every_op().by_name["stem_norm"]) == "real"


def test_bytes_round_trip() -> None:
    graph = every_op()
    assert Graph.from_bytes(graph.to_bytes()) == graph
    assert Graph.from_bytes(graph.to_bytes()).id == graph.id


# A new value means that all models out there get another identity: raise format_version with it.
EVERY_OP_ID = "c345bac5dd603d3aa5d241eaebaf85e287adb5d13590798f76bac2d4b0b947cf"
EARLIER_ID = "5eb51cd37d22f48019636c535ad4b967256c47dd1547bd02c728f072b18ac024"


def before_shapes() -> Graph:
    """The example without the operations that came last."""
    later = {"concat", "slice", "shuffle", "pad", "upsample", "adaptive"}
    kept = [node for node in every_op().nodes if node.name not in later]
    nodes = tuple(replace(node, inputs=("avg_pool",)) if node.name == "mean" else node for node in kept)
    return replace(every_op(), nodes=nodes)


def test_id_is_the_same_everywhere_and_ever() -> None:
    """Operations that came later leave the encoding of graphs without them as it was."""
    graph = before_shapes()
    assert graph.id == EVERY_OP_ID
    program = (
        "import sys; from fedmpq.model.graph import Graph;print(Graph.from_bytes(sys.stdin.buffer.read()).id)"
    )
    for seed in "1", "2":
        run = subprocess.run(
            [sys.executable, "-c", program],
            input=graph.to_bytes(),
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert run.stdout.decode().strip() == graph.id


def test_a_graph_of_earlier_operations_keeps_its_id() -> None:
    """Boards that know no newer operation still read it."""
    nodes = {node.name: node for node in before_shapes().nodes if not node.name.startswith("silu")}
    nodes["max_pool"] = replace(nodes["max_pool"], inputs=("add.quantized",))
    assert Graph("every_op", IMAGE, tuple(nodes.values()), "fc").id == EARLIER_ID


def changed(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, tuple):
        return [(value[0] + 1, value[1]), (value[0], value[1] + 1)]
    return [value + ("x" if isinstance(value, str) else 1)]


OPS = sorted({node.op for node in every_op().nodes}, key=repr)


@pytest.mark.parametrize(("op", "field"), [(op, field.name) for op in OPS for field in fields(op)])
def test_every_attribute_is_in_the_bytes(op: Any, field: str) -> None:
    def encoded(op: Op) -> bytes:
        node = graph_pb2.Node()
        graph_wire.write_op(op, node)
        assert graph_wire.read_op(node) == op
        return node.SerializeToString()

    for value in changed(getattr(op, field)):
        assert encoded(replace(op, **{field: value})) != encoded(op)


def test_any_change_changes_the_id() -> None:
    graph = every_op()
    others = [replace(graph, name="other")]
    for field in ("height", "width", "scale", "zero_point"):
        others.append(replace(graph, input=replace(IMAGE, **{field: getattr(IMAGE, field) + 1})))
    for node in graph.nodes:
        for field in (field.name for field in dataclasses.fields(node.op)):
            for value in changed(getattr(node.op, field)):
                try:
                    others.append(with_op(graph, node.name, **{field: value}))
                except GraphError:
                    continue
    others.append(graph_with_inputs("relu.quantized", "block.conv.quantized"))
    others.append(
        replace(graph, nodes=(*graph.nodes[:-1], replace(graph.nodes[-1], name="head")), output="head")
    )
    ids = {graph.id, *(other.id for other in others)}
    assert len(ids) == len(others) + 1
    assert len(others) > 25


def message_of(graph: Graph) -> graph_pb2.Graph:
    return graph_pb2.Graph.FromString(graph.to_bytes())


def test_dropout_is_in_the_bytes_of_graphs_that_have_it_only() -> None:
    plain = every_op()
    number = next(i for i, node in enumerate(plain.nodes) if isinstance(node.op, Conv2d))
    nodes = list(plain.nodes)
    seen = {plain.id}
    for dropout in (Dropout(0.5), Dropout(0.25), Dropout(0.5, whole_channels=True)):
        nodes[number] = replace(nodes[number], dropout=dropout)
        graph = replace(plain, nodes=tuple(nodes))
        assert Graph.from_bytes(graph.to_bytes()) == graph
        seen.add(graph.id)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("kind", "dropout", "words"),
    [
        (Conv2d, Dropout(0.0), "the rate of the dropout is"),
        (Conv2d, Dropout(1.0), "must be below 1"),
        (Conv2d, Dropout(math.nan), "the rate of the dropout is"),
        (Relu, Dropout(0.5), "only layers do"),
        (Linear, Dropout(0.5, whole_channels=True), "drops whole channels"),
    ],
)
def test_a_dropout_that_cannot_be_is_refused(kind: type[Any], dropout: Dropout, words: str) -> None:
    nodes = tuple(
        replace(node, dropout=dropout) if isinstance(node.op, kind) else node for node in every_op().nodes
    )
    with pytest.raises(GraphError, match=words):
        replace(every_op(), nodes=nodes)


def test_other_format_versions_are_refused() -> None:
    message = message_of(every_op())
    message.format_version = 4
    with pytest.raises(GraphError, match="format version 4, this fedmpq reads 1 and 2 and 3: update"):
        Graph.from_bytes(message.SerializeToString())


def test_an_operation_of_a_newer_version_is_refused_by_number() -> None:
    message = message_of(every_op())
    message.nodes[2].ClearField("relu")
    # Field 100, an empty message.
    message.nodes[2].MergeFromString(b"\xa2\x06\x00")
    with pytest.raises(GraphError, match="node 'relu' has an operation of field number 100, unknown"):
        Graph.from_bytes(message.SerializeToString())


def test_a_node_without_operation_is_refused() -> None:
    message = message_of(every_op())
    message.nodes[2].ClearField("relu")
    with pytest.raises(GraphError, match="node 'relu' has no operation"):
        Graph.from_bytes(message.SerializeToString())


def test_unknown_fields_and_other_encodings_are_refused() -> None:
    data = every_op().to_bytes()
    # Field 100 of the graph; the output once more, which protobuf lets win over the first.
    for addition in b"\xa0\x06\x01", b"\x2a\x02fc":
        with pytest.raises(GraphError, match="not in its one encoding"):
            Graph.from_bytes(data + addition)


def test_the_largest_graph_fits_the_limit_of_bytes() -> None:
    names = [f"n{i}_".ljust(128, "x") for i in range(4096)]
    ops: list[Op] = [Flatten(), Linear(189, 2, bias=False), *[Add()] * 4094]
    inputs = [(INPUT,), (names[0],), *((names[i - 1],) * 2 for i in range(2, 4096))]
    nodes = tuple(Node(*parts) for parts in zip(names, ops, inputs, strict=True))
    graph = Graph("x" * 128, IMAGE, nodes, names[-1])
    assert Graph.from_bytes(graph.to_bytes()) == graph


def test_too_many_bytes_are_refused_unread() -> None:
    with pytest.raises(GraphError, match="too many for a graph"):
        Graph.from_bytes(bytes(3 * 2**20 + 1))


def parse(data: bytes) -> None:
    """What must hold for any bytes: a graph that encodes to them, or GraphError."""
    try:
        graph = Graph.from_bytes(data)
    except GraphError:
        return
    assert graph.to_bytes() == data


@pytest.mark.parametrize("field", ["name", "output", "inputs", "node", "no operation"])
def test_complaints_about_hostile_names_stay_short(field: str) -> None:
    message, long = message_of(every_op()), "x" * 2**20
    if field == "inputs":
        message.nodes[0].inputs[0] = long
    elif field in ("node", "no operation"):
        message.nodes[0].name = long
        if field == "no operation":
            message.nodes[0].ClearField("conv2d")
    else:
        setattr(message, field, long)
    with pytest.raises(GraphError) as caught:
        Graph.from_bytes(message.SerializeToString())
    assert len(str(caught.value)) < 400


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    parse(data)


@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    mutant = bytearray(every_op().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutant)))
        end = data.draw(st.integers(start, min(len(mutant), start + 8)))
        mutant[start:end] = data.draw(st.binary(max_size=8))
    parse(bytes(mutant))


SMALL = st.integers(0, 9)
NUMBERS = SMALL | st.sampled_from([2**16, 2**16 + 1, 2**31, 2**32 - 1])
SIZES = st.builds(graph_pb2.Size, height=NUMBERS, width=NUMBERS)
FLOATS = st.floats(width=32)


def message_fields(message: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Arbitrary values for the fields of a message, each field present or not."""
    by_type = {
        message.DESCRIPTOR.fields[0].TYPE_UINT32: NUMBERS,
        message.DESCRIPTOR.fields[0].TYPE_BOOL: st.booleans(),
        message.DESCRIPTOR.fields[0].TYPE_FLOAT: FLOATS,
        message.DESCRIPTOR.fields[0].TYPE_DOUBLE: FLOATS,
        message.DESCRIPTOR.fields[0].TYPE_MESSAGE: SIZES,
        message.DESCRIPTOR.fields[0].TYPE_STRING: st.sampled_from(["", "silu", "leaky_relu", "\0"]),
    }
    return st.fixed_dictionaries(
        {}, optional={field.name: by_type[field.type] for field in message.DESCRIPTOR.fields}
    )


NAMES = st.sampled_from([INPUT, "a", "b", "c", "", "\0", "fc"])


@st.composite
def hostile_graphs(draw: st.DrawFn) -> bytes:
    """Well-formed messages that say whatever they like."""
    message = graph_pb2.Graph(
        format_version=1,
        name="hostile",
        input=graph_pb2.Input(**draw(message_fields(graph_pb2.Input))),
        output=draw(NAMES),
    )
    if draw(st.booleans()):
        message.input.CopyFrom(graph_pb2.Input(channels=3, height=9, width=9, scale=1.0))
    operations: list[Any] = list(graph_pb2.Node.DESCRIPTOR.oneofs_by_name["op"].fields)
    for _ in range(draw(st.integers(0, 4))):
        node = message.nodes.add(name=draw(NAMES), inputs=draw(st.lists(NAMES, max_size=3)))
        field = draw(st.sampled_from(operations))
        chosen = getattr(node, field.name)
        chosen.SetInParent()
        if field.message_type.fields:
            chosen.MergeFrom(type(chosen)(**draw(message_fields(chosen))))
    return message.SerializeToString(deterministic=True)


@given(hostile_graphs())
def test_hostile_messages(data: bytes) -> None:
    parse(data)
