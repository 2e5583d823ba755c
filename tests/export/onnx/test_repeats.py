"""What repeats in a graph becomes functions: fewer bytes, the same graph once they are inlined."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fedmpq.export.onnx.runtime import float_session
from fedmpq.export.onnx.short_names import short_names
from fedmpq.export.onnx.writer import OnnxWriter

FEATURES = 4
UNITS = 24


def chain(writer: OnnxWriter, units: int) -> list[str]:
    """Units `x -> relu(x * own + shared) - x`; the values between them."""
    value, values = "x", []
    random = np.random.default_rng(0)
    shared = writer.constant(np.full(FEATURES, 0.25, np.float32))
    for _ in range(units):
        own = writer.constant(random.uniform(0.5, 1.5, FEATURES).astype(np.float32))
        sums = writer.node("Add", [writer.node("Mul", [value, own]), shared])
        value = writer.node("Sub", [writer.node("Relu", [sums]), value])
        values.append(value)
    writer.node("Identity", [value], output="y")
    return values


def interface() -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    shape: list[str | int] = ["N", FEATURES]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    return [x], [y]


def plain(writer: OnnxWriter) -> onnx.ModelProto:
    graph = helper.make_graph(writer.nodes, "chain", *interface(), list(writer.constants.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def models() -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, str]]:
    writer, other = OnnxWriter(), OnnxWriter()
    chain(other, UNITS)
    kept = {"middle": chain(writer, UNITS)[UNITS // 2]}
    shared, names = writer.model("chain", *interface(), kept)
    return plain(other), shared, names


def test_a_shared_graph_computes_the_same(
    models: tuple[onnx.ModelProto, onnx.ModelProto, dict[str, str]],
) -> None:
    flat, shared, _ = models
    x = np.random.default_rng(1).normal(size=(5, FEATURES)).astype(np.float32)
    expected = float_session(flat.SerializeToString())(x)
    np.testing.assert_array_equal(float_session(shared.SerializeToString())(x), expected)


def test_repeats_are_said_once(
    models: tuple[onnx.ModelProto, onnx.ModelProto, dict[str, str]],
) -> None:
    flat, shared, _ = models
    calls = [node for node in shared.graph.node if node.domain]
    assert len(calls) < UNITS  # some units are joined
    assert all(len(function.node) > 1 for function in shared.functions)
    own = 4 * FEATURES * UNITS
    assert shared.ByteSize() - own < 0.55 * (flat.ByteSize() - own)


def test_kept_values_stay_values_of_the_graph(
    models: tuple[onnx.ModelProto, onnx.ModelProto, dict[str, str]],
) -> None:
    _, shared, names = models
    assert names["middle"] in {name for node in shared.graph.node for name in node.output}


def test_a_graph_without_repeats_has_no_functions() -> None:
    writer = OnnxWriter()
    chain(writer, 1)
    model, _ = writer.model("chain", *interface(), {})
    assert not model.functions
    assert [opset.domain for opset in model.opset_import] == [""]


def test_names_are_short_and_different() -> None:
    names = short_names(Counter({f"value{i}": 1000 - i for i in range(400)}))
    assert len(set(names.values())) == 400
    assert [len(names[f"value{i}"]) for i in (0, 51, 52, 399)] == [1, 1, 2, 2]
    assert short_names(Counter()) == {}
