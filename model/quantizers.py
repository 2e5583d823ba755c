"""Where activations become integer codes.

Layers, additions, products, lookups, pools and all that moves elements about read codes. A ReLU, and a
BatchNorm behind a layer that it alone reads, melt into the rounding that follows them and read real values;
any other BatchNorm reads codes:

    conv - batch_norm - relu -> [quantize, unsigned] -> conv
    conv - batch_norm -> [quantize, signed 8 bit] -> add <- codes of the other branch
    conv - batch_norm -> [quantize, signed 8 bit] -> lookup (SiLU) -> [quantize, signed 8 bit] -> conv
    concat of codes -> batch_norm - relu -> [quantize, unsigned] -> conv
"""

from __future__ import annotations

from dataclasses import replace

from fedmpq.model.graph import INPUT, Graph, GraphError, Lookup, Mul, Node, Quantize, Relu
from fedmpq.model.ops import RULES, ShapeOp, check_range
from fedmpq.model.pointwise import FUNCTIONS

WIDE_BITS = 8
"""Width of the codes of a value that no ReLU gives, such as an input of a residual addition."""


def place_quantizers(graph: Graph, activation_bits: int) -> Graph:
    """`graph` with a Quantize node `<producer>.quantized` behind every real value that is needed as codes.

    A ReLU's output gets `activation_bits` without a sign; what else cannot be negative gets 8 bits without
    one, and any other value 8 bits with one. One quantizer per producer serves all that need codes; the
    graph's output stays real.
    """
    check_range("activation_bits", activation_bits, 1, 8)
    if any(isinstance(node.op, Quantize) for node in graph.nodes):
        raise GraphError(f"the graph {graph.name!r} has quantizers already: trace with activation_bits=None")
    # Pools and Flatten hand on what they read: once their input is quantized, they give codes as well.
    producers = [node for node in graph.nodes if RULES[type(node.op)].gives == "real"]
    quantized = {node.name: f"{node.name}.quantized" for node in producers if _feeds_codes(graph, node)}
    nodes: list[Node] = []
    for node in graph.nodes:
        if graph.reads(node) == "codes":
            node = replace(node, inputs=tuple(quantized.get(name, name) for name in node.inputs))
        nodes.append(node)
        if node.name in quantized:
            bits = activation_bits if isinstance(node.op, Relu) else WIDE_BITS
            op = Quantize(bits, signed=_may_be_negative(graph, node.name))
            nodes.append(Node(quantized[node.name], op, (node.name,)))
    placed = replace(graph, nodes=tuple(nodes))
    check_quantizers(placed)
    return placed


def check_quantizers(graph: Graph) -> None:
    """Raises `GraphError` unless `graph` can run: every node reads the kind of value it computes on."""
    for node in graph.nodes:
        needed = graph.reads(node)
        for name in node.inputs:
            if needed not in (None, graph.kinds[name]):
                raise GraphError(
                    f"node {node.name!r} ({type(node.op).__name__}) reads {name!r}, which holds"
                    f" {graph.kinds[name]}, needs {needed}: pass the graph through place_quantizers"
                )


def _may_be_negative(graph: Graph, name: str) -> bool:
    """Whether the value called `name`, before quantizers are placed, may be below zero."""
    if name == INPUT:
        return graph.input.zero_point > 0
    node = graph.by_name[name]
    if isinstance(node.op, Lookup):
        return FUNCTIONS[node.op.function].negative
    if isinstance(node.op, Mul | ShapeOp):
        return any(_may_be_negative(graph, source) for source in node.inputs)
    return not isinstance(node.op, Relu)


def bound_before(graph: Graph, quantizer: Node) -> float:
    """The greatest magnitude of what a Quantize node reads, where its producer has one, else 0.

    Clips stop there: codes beyond would stand for values that never come.
    """
    source = graph.by_name[quantizer.inputs[0]]
    if isinstance(source.op, Relu):
        return source.op.maximum
    return FUNCTIONS[source.op.function].bound if isinstance(source.op, Lookup) else 0.0


def _feeds_codes(graph: Graph, producer: Node) -> bool:
    readers = (graph.by_name[name] for name in graph.consumers[producer.name])
    return any(graph.reads(reader) == "codes" for reader in readers)
