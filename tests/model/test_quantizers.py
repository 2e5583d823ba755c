"""Where quantizers go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model.graph import (
    INPUT,
    Add,
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
    Op,
    Quantize,
    Relu,
)
from fedmpq.model.quantizers import check_quantizers, place_quantizers

IMAGE = Input(channels=4, height=8, width=8, scale=1.0, zero_point=0)
CONV = Conv2d(4, 4, (3, 3), (1, 1), (1, 1), (1, 1), groups=1, bias=False)
NORM = BatchNorm(4, 1e-5, 0.1)
LINEAR = Linear(4, 3, bias=True)


def graph_of(*nodes: tuple[str, Op, str] | tuple[str, Op, str, str]) -> Graph:
    made = tuple(Node(name, op, tuple(inputs)) for name, op, *inputs in nodes)
    return Graph("net", IMAGE, made, made[-1].name)


def headed(last: str, *nodes: tuple[str, Op, str] | tuple[str, Op, str, str]) -> Graph:
    """The nodes, then global mean, Flatten and a linear layer on `last`."""
    head: list[tuple[str, Op, str]] = [
        ("mean", GlobalAvgPool(), last),
        ("flatten", Flatten(), "mean"),
        ("fc", LINEAR, "flatten"),
    ]
    return graph_of(*nodes, *head)


def residual() -> Graph:
    return headed(
        "relu2",
        ("conv1", CONV, INPUT),
        ("norm1", NORM, "conv1"),
        ("relu1", Relu(0.0), "norm1"),
        ("conv2", CONV, "relu1"),
        ("norm2", NORM, "conv2"),
        ("add", Add(), "norm2", "relu1"),
        ("relu2", Relu(0.0), "add"),
    )


def quantizers(graph: Graph) -> dict[str, tuple[int, bool]]:
    return {n.name: (n.op.bits, n.op.signed) for n in graph.nodes if isinstance(n.op, Quantize)}


def test_residual_block() -> None:
    placed = place_quantizers(residual(), activation_bits=3)
    assert quantizers(placed) == {
        "relu1.quantized": (3, False),
        "norm2.quantized": (8, True),
        "relu2.quantized": (3, False),
    }
    assert placed.by_name["add"].inputs == ("norm2.quantized", "relu1.quantized")
    assert placed.by_name["relu2"].inputs == ("add",)
    assert placed.by_name["mean"].inputs == ("relu2.quantized",)
    assert placed.consumers["relu1.quantized"] == ("conv2", "add")
    assert placed.output == "fc"
    assert placed.kinds["fc"] == "real"


def test_quantizers_stand_behind_their_producers() -> None:
    names = [node.name for node in place_quantizers(residual(), 4).nodes]
    for name in ("relu1", "norm2", "relu2"):
        assert names[names.index(name) + 1] == f"{name}.quantized"


def test_relu_and_others_may_share_a_producer() -> None:
    graph = headed(
        "add",
        ("conv", CONV, INPUT),
        ("relu", Relu(0.0), "conv"),
        ("add", Add(), "conv", "relu"),
    )
    placed = place_quantizers(graph, 4)
    assert placed.by_name["relu"].inputs == ("conv",)
    assert placed.by_name["add"].inputs == ("conv.quantized", "relu.quantized")
    assert quantizers(placed)["conv.quantized"] == (8, True)
    assert quantizers(placed)["add.quantized"] == (8, True)


def test_one_quantizer_serves_all_readers() -> None:
    graph = headed("sum", ("a", CONV, INPUT), ("b", CONV, "a"), ("sum", Add(), "a", "b"))
    placed = place_quantizers(graph, 4)
    assert placed.consumers["a"] == ("a.quantized",)
    assert placed.consumers["a.quantized"] == ("b", "sum")


def test_pools_of_codes_need_no_quantizer() -> None:
    graph = headed(
        "conv",
        ("image_pool", MaxPool((2, 2), (2, 2), (0, 0)), INPUT),
        ("conv", CONV, "image_pool"),
    )
    assert list(quantizers(place_quantizers(graph, 4))) == ["conv.quantized"]


def test_a_relu_that_is_the_output_stays_real() -> None:
    graph = headed("conv", ("conv", CONV, INPUT))
    graph = Graph("net", IMAGE, (*graph.nodes, Node("relu", Relu(0.0), ("fc",))), "relu")
    placed = place_quantizers(graph, 4)
    assert placed.nodes[-1].name == placed.output == "relu"


def test_a_pooled_output_is_codes() -> None:
    graph = graph_of(("conv", CONV, INPUT), ("mean", GlobalAvgPool(), "conv"), ("flatten", Flatten(), "mean"))
    assert place_quantizers(graph, 4).kinds["flatten"] == "codes"


def test_placing_twice_is_refused() -> None:
    with pytest.raises(GraphError, match="has quantizers already"):
        place_quantizers(place_quantizers(residual(), 4), 4)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_have_limits(bits: int) -> None:
    with pytest.raises(GraphError, match=rf"activation_bits is {bits}, must be within 1\.\.8"):
        place_quantizers(residual(), bits)


def test_check_names_who_reads_what() -> None:
    with pytest.raises(GraphError, match=r"'conv2' \(Conv2d\) reads 'relu1', which holds real, needs codes"):
        check_quantizers(residual())
    check_quantizers(place_quantizers(residual(), 4))


SAME_SHAPE: list[Op] = [CONV, Relu(0.0), Add(), MaxPool((3, 3), (1, 1), (1, 1))]


@st.composite
def networks(draw: st.DrawFn) -> Graph:
    """Random graphs in which every value has the image's shape."""
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 10))):
        values = [INPUT, *(node.name for node in nodes)]
        op = draw(st.sampled_from(SAME_SHAPE))
        # Reading the last value at least once keeps every node in use.
        inputs = (values[-1], draw(st.sampled_from(values))) if isinstance(op, Add) else (values[-1],)
        nodes.append(Node(f"n{index}", op, inputs))
        if op is CONV and draw(st.booleans()):
            nodes.append(Node(f"norm{index}", NORM, (f"n{index}",)))
    head: list[tuple[str, Op]] = [("mean", GlobalAvgPool()), ("flatten", Flatten()), ("fc", LINEAR)]
    for name, op in head:
        nodes.append(Node(name, op, (nodes[-1].name,)))
    norms = {node.inputs[0] for node in nodes if isinstance(node.op, BatchNorm)}
    # A layer with a BatchNorm must have no other reader.
    kept = [
        node
        if not isinstance(node.op, Add)
        else Node(node.name, node.op, (node.inputs[0], INPUT if node.inputs[1] in norms else node.inputs[1]))
        for node in nodes
    ]
    return Graph("random", IMAGE, tuple(kept), "fc")


@given(networks(), st.integers(1, 8))
def test_placed_graphs_can_run_and_lose_nothing(graph: Graph, bits: int) -> None:
    placed = place_quantizers(graph, bits)
    check_quantizers(placed)
    added = quantizers(placed)
    # Without the quantizers it is the graph it was.
    stripped = tuple(
        Node(node.name, node.op, tuple(name.removesuffix(".quantized") for name in node.inputs))
        for node in placed.nodes
        if node.name not in added
    )
    assert stripped == graph.nodes
    for name, (width, signed) in added.items():
        after_relu = isinstance(graph.by_name[name.removesuffix(".quantized")].op, Relu)
        assert (width, signed) == ((bits, False) if after_relu else (8, True))
        assert placed.consumers[name]
