"""How a graph falls into units, and which graphs are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    GraphError,
    Input,
    Linear,
    MaxPool,
    Node,
    Quantize,
    Relu,
)
from fedmpq.model.ops import RULES
from fedmpq.model.quantizers import place_quantizers
from fedmpq.training.native_plan import (
    FlattenUnit,
    PoolUnit,
    ProductUnit,
    Quantizer,
    SumUnit,
    units_of,
)
from tests.training.small_graphs import GRAPHS, Net


def test_a_layer_with_all_that_follows_is_one_unit(make_model: Callable[..., Any]) -> None:
    graph = make_model().graph
    units = units_of(graph)
    assert [(type(unit), unit.sources, unit.output) for unit in units] == [
        (ProductUnit, (INPUT,), "stem_relu.quantized"),
        (ProductUnit, ("stem_relu.quantized",), "depthwise_norm.quantized"),
        (SumUnit, ("depthwise_norm.quantized", "stem_relu.quantized"), "sum_relu.quantized"),
        (ProductUnit, ("sum_relu.quantized",), "wide_relu.quantized"),
        (PoolUnit, ("wide_relu.quantized",), "mean"),
        (FlattenUnit, ("mean",), "flat"),
        (ProductUnit, ("flat",), "classes"),
    ]
    stem, depthwise, total, wide, *_, classes = units
    assert isinstance(stem, ProductUnit)
    assert isinstance(depthwise, ProductUnit)
    assert isinstance(total, SumUnit)
    assert isinstance(wide, ProductUnit)
    assert isinstance(classes, ProductUnit)
    assert [unit.index for unit in (stem, depthwise, wide, classes)] == [0, 1, 2, 3]
    assert [unit.norm.name if unit.norm else None for unit in (stem, depthwise, wide, classes)] == [
        "stem_norm",
        "depthwise_norm",
        None,
        None,
    ]
    assert stem.quantizer == Quantizer("stem_relu.quantized", Quantize(4, False), 0.0)
    assert depthwise.quantizer == Quantizer("depthwise_norm.quantized", Quantize(8, True), 0.0)
    assert total.quantizer == Quantizer("sum_relu.quantized", Quantize(4, False), 6.0)
    assert classes.quantizer is None


@pytest.mark.parametrize("name", GRAPHS)
def test_every_unit_reads_what_an_earlier_one_gives(name: str) -> None:
    graph = GRAPHS[name]()
    units = units_of(graph)
    given = {INPUT}
    for unit in units:
        assert given >= set(unit.sources)
        assert unit.output not in given
        given.add(unit.output)
    codes = {node.name for node in graph.nodes if graph.kinds[node.name] == "codes"}
    dropped = {f"{node.name} dropped" for node in graph.nodes if node.dropout is not None}
    assert given == codes | dropped | {INPUT, graph.output}
    products = [unit for unit in units if isinstance(unit, ProductUnit)]
    assert [unit.node for unit in products] == list(graph.layers)
    assert [unit.index for unit in products] == list(range(len(graph.layers)))


def test_a_relu_of_codes_is_a_sum_of_one() -> None:
    net = Net(2, 6, 6)
    x = net.relu(net.add(AvgPool((2, 2), (2, 2), (0, 0)), net.conv(INPUT, 4, relu=None)), 6.0)
    units = units_of(net.graph(x))
    assert units[2] == SumUnit(("avgpool2",), Quantizer("relu3.quantized", Quantize(4, False), 6.0))


def test_an_image_can_be_read_by_anything() -> None:
    net = Net(3, 6, 6)
    x = net.relu(net.add(Add(), INPUT, net.add(MaxPool((3, 3), (1, 1), (1, 1)), net.relu(INPUT))))
    assert [unit.sources for unit in units_of(net.graph(x))[:3]] == [
        (INPUT,),
        ("relu0.quantized",),
        (INPUT, "maxpool1"),
    ]


def chained(*ops: Any, shape: tuple[int, int, int] = (3, 8, 8), classes: int = 5) -> Graph:
    """One op after the other, then pooled and classified, quantizers placed."""
    nodes, name = [], INPUT
    for index, op in enumerate(ops):
        nodes.append(Node(f"op{index}", op, (name,)))
        name = f"op{index}"
    channels = ops[-1].out_channels if isinstance(ops[-1], Conv2d) else shape[0]
    nodes += [
        Node("pool", GlobalAvgPool(), (name,)),
        Node("flat", Flatten(), ("pool",)),
        Node("classes", Linear(channels, classes, True), ("flat",)),
    ]
    return place_quantizers(Graph("chain", Input(*shape, 0.015625, 110), tuple(nodes), "classes"), 4)


def conv(channels: int = 3, **options: Any) -> Conv2d:
    whole = Conv2d(3, channels, (3, 3), (1, 1), (1, 1), (1, 1), 1, False)
    return replace(whole, **options)


def with_tail(graph: Graph, *nodes: Node) -> Graph:
    return replace(graph, nodes=(*graph.nodes, *nodes), output=nodes[-1].name)


def rounded_twice() -> Graph:
    """A convolution whose value a ReLU reads, and an addition too."""
    net = Net(3, 6, 6)
    x = net.conv(INPUT, 4, relu=None)
    return net.graph(net.add(Add(), x, net.relu(x)))


def two_relus() -> Graph:
    net = Net(3, 6, 6)
    x = net.conv(INPUT, 4, relu=None)
    return net.graph(net.add(Add(), net.relu(x), net.relu(x, 6.0)))


def relu_of_relu_of_codes() -> Graph:
    """The bound of the first would be lost."""
    net = Net(3, 6, 6)
    x = net.add(GlobalAvgPool(), net.conv(INPUT, 4, relu=None))
    return net.graph(net.relu(net.relu(x, 6.0)))


def signed_relu() -> Graph:
    graph = chained(conv(), Relu(0.0))
    nodes = [replace(n, op=Quantize(8, True)) if isinstance(n.op, Quantize) else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def bare() -> Graph:
    return replace(
        graph := chained(conv()),
        nodes=tuple(
            replace(node, inputs=tuple(name.removesuffix(".quantized") for name in node.inputs))
            for node in graph.nodes
            if not isinstance(node.op, Quantize)
        ),
    )


def summed_logits() -> Graph:
    graph = chained(conv())
    more = Node("more", Linear(3, 5, True), ("flat",))
    codes = [Node(f"{name}.quantized", Quantize(8, True), (name,)) for name in ("classes", "more")]
    return with_tail(graph, more, *codes, Node("sum", Add(), ("classes.quantized", "more.quantized")))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (rounded_twice, "value of 'batchnorm1' is rounded 2 times"),
        (two_relus, "value of 'batchnorm1' is rounded 2 times"),
        (lambda: chained(conv(), Relu(0.0), Relu(6.0)), "value of 'op0' is rounded 0 times"),
        (relu_of_relu_of_codes, "value of 'relu3' is rounded 0 times"),
        (signed_relu, "'op1.quantized' quantizes a ReLU's output with a sign"),
        (bare, r"'pool' \(GlobalAvgPool\) reads 'op0', which holds real"),
        (
            lambda: with_tail(chained(conv()), Node("norm", BatchNorm(5, 1e-5, 0.125), ("classes",))),
            r"logits come out of 'norm' \(BatchNorm\); the native engine needs a linear layer last",
        ),
        (lambda: with_tail(chained(conv()), Node("cut", Relu(0.0), ("classes",))), r"of 'cut' \(Relu\)"),
        (summed_logits, r"logits come out of 'sum' \(Add\)"),
        (
            lambda: chained(conv(channels=65536)),
            "'op0' has 589824 products of errors for each pixel; the native engine adds up at most 132104",
        ),
        (
            lambda: chained(GlobalAvgPool(), shape=(1, 4096, 2080)),
            "'op0' averages 8519680 pixels; the native engine adds up at most 8421504",
        ),
        (
            lambda: chained(conv(kernel=(1, 1), padding=(8192, 8192), stride=(200, 200))),
            "'op0' pads 8 x 8 pixels to about 17192 x 17192",
        ),
        (
            lambda: chained(conv(), shape=(3, 260, 260)),
            "'op0' has 67600 output pixels; the native engine adds up at most 65793",
        ),
    ],
)
def test_a_graph_that_units_cannot_express_is_refused(make: Callable[[], Graph], complaint: str) -> None:
    with pytest.raises(GraphError, match=complaint):
        units_of(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: chained(conv(kernel=(33, 40), padding=(16, 16)), shape=(3, 40, 40)),
        lambda: chained(conv(kernel=(1, 1), padding=(0, 0), stride=(1, 65536), channels=4096)),
        lambda: chained(conv(stride=(2, 2)), shape=(3, 256, 256)),
        # 4-bit codes leave room for sums over more pixels than the image does.
        lambda: chained(conv(stride=(2, 2)), Relu(0.0), conv(padding=(101, 101)), shape=(3, 256, 256)),
        lambda: chained(
            conv(stride=(2, 2)),
            Relu(0.0),
            MaxPool((3, 3), (1, 1), (1, 1)),
            conv(padding=(101, 101)),
            shape=(3, 256, 256),
        ),
    ],
)
def test_what_the_kernels_hold_is_taken(make: Callable[[], Graph]) -> None:
    assert units_of(make())


@pytest.mark.parametrize("bits", [5, 8])
def test_wider_codes_and_averages_count_as_bytes(bits: int) -> None:
    wide = chained(conv(stride=(2, 2)), Relu(0.0), conv(padding=(101, 101)), shape=(3, 256, 256))
    nodes = [replace(n, op=replace(n.op, bits=bits)) if isinstance(n.op, Quantize) else n for n in wide.nodes]
    with pytest.raises(GraphError, match="'op2' has 107584 output pixels"):
        units_of(replace(wide, nodes=tuple(nodes)))
    averaged = chained(
        conv(stride=(2, 2)),
        Relu(0.0),
        AvgPool((3, 3), (1, 1), (1, 1)),
        conv(padding=(101, 101)),
        shape=(3, 256, 256),
    )
    with pytest.raises(GraphError, match="'op3' has 107584 output pixels"):
        units_of(averaged)


def test_every_operation_is_of_some_unit_or_melts_into_one() -> None:
    """An operation that is new to graphs must not be passed over in silence."""
    seen = {type(node.op) for make in GRAPHS.values() for node in make().nodes}
    assert seen == set(RULES)
