"""What server and client hand each other."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.exchange.messages import (
    Assignment,
    PlanError,
    TrainingPlan,
    Update,
    bit_widths,
    pack_layers,
    payload_bytes,
    rounded_side,
    that_fit_half,
    unpack_layers,
)
from fedmpq.model.graph import INPUT, Conv2d, Flatten, Graph, GraphError, Input, Linear, Node
from fedmpq.model.quantized import Layers, QuantizedLayer, Side

GRAPH = Graph(
    "net",
    Input(1, 4, 4, 1.0, 0),
    (
        Node("second", Conv2d(1, 3, (3, 3), (1, 1), (0, 0), (1, 1), groups=1, bias=False), (INPUT,)),
        Node("flat", Flatten(), ("second",)),
        Node("first", Linear(12, 2, bias=True), ("flat",)),
    ),
    "first",
)


def random_layers() -> Layers:
    random = np.random.default_rng(0)
    return {
        node.name: QuantizedLayer.from_weights(
            random.normal(size=GRAPH.weight_shape(node.name)).astype(np.float32), bits, "max", per_channel
        )
        for node, bits, per_channel in zip(GRAPH.layers, (3, 8), (True, False), strict=True)
    }


def test_layers_survive_packing() -> None:
    layers = random_layers()
    again = unpack_layers(GRAPH, pack_layers(layers))
    assert again.keys() == layers.keys()
    for name, layer in layers.items():
        assert again[name].bits == layer.bits
        np.testing.assert_array_equal(again[name].codes, layer.codes)
        np.testing.assert_array_equal(again[name].step, layer.step)


def test_bit_widths_come_in_the_graphs_order() -> None:
    packed = pack_layers(random_layers())
    assert bit_widths(GRAPH, packed) == (3, 8)
    assert bit_widths(GRAPH, dict(reversed(packed.items()))) == (3, 8)


def test_what_is_sent_is_counted_in_full() -> None:
    layers = pack_layers(random_layers())
    side = {"first.bias": np.zeros(2, np.float32), "bn.weight": np.full(3, 0.1, np.float32)}
    # 27 weights at 3 bits with 3 steps, 24 at 8 with one; half precision holds two side values, not the rest.
    expected = 3 * 4 + 3 * 4 + 8 * 3 + 4 + 2 * 2 + 3 * 4
    assert payload_bytes(layers, side) == expected
    assert Assignment(0, 1, 2, layers, side, TrainingPlan()).nbytes == expected
    assert Update(1, 2, 10, layers, side, 0.5, 0.5).nbytes == expected


def test_a_layer_the_graph_does_not_have_is_refused() -> None:
    layers = random_layers()
    with pytest.raises(GraphError, match="'third' is no layer"):
        unpack_layers(GRAPH, pack_layers({"third": layers["first"]}))


def test_planes_of_another_shape_are_refused() -> None:
    layers = random_layers()
    swapped = {"second": layers["first"], "first": layers["second"]}
    with pytest.raises(ValueError, match="layer 'second': planes of 27 weights have 4 bytes each, not 3"):
        unpack_layers(GRAPH, pack_layers(swapped))


def test_the_default_plan_is_the_papers() -> None:
    plan = TrainingPlan()
    assert (plan.epochs, plan.batch_size, plan.learning_rate) == (5, 64, 0.1)
    assert (plan.momentum, plan.weight_decay) == (0.9, 5e-4)
    assert (plan.lasso, plan.prune_density, plan.update) == (0.01, 0.03, "paper")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 1),
        ("pad", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("code_learning_rate", -0.1),
        ("momentum", 1.0),
        ("momentum", float("nan")),
        ("momentum_bits", 16),
        ("weight_decay", -1e-4),
        ("weight_decay", float("nan")),
        ("lasso", -1.0),
        ("lasso", float("inf")),
        ("prune_density", 1.5),
        ("prune_density", float("nan")),
        ("update", "papers"),
    ],
)
def test_a_setting_outside_its_range_is_named(name: str, value: Any) -> None:
    assert name in {field.name for field in fields(TrainingPlan)}
    with pytest.raises(PlanError, match=f"^{name} = "):
        replace(TrainingPlan(), **{name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"prune_density": None},
        {"prune_density": 0.0},
        {"prune_density": 1.0},
        {"lasso": 0.0},
        {"momentum": 0.0, "momentum_bits": 0},
        {"update": "carried", "code_learning_rate": 1e-4},
        {"epochs": 1, "batch_size": 2},
    ],
)
def test_settings_at_the_edge_are_taken(settings: dict[str, Any]) -> None:
    plan = TrainingPlan(**settings)
    assert all(getattr(plan, name) == value for name, value in settings.items())


def test_side_tensors_are_rounded_to_half_where_that_is_safe() -> None:
    side: Side = {
        "bn.weight": np.array([0.1, 1e-9, -3.0], np.float32),
        "bn.running_mean": np.array([7e4, 0.1], np.float32),
        "bn.running_var": np.array([0.3, 1e-6], np.float32),
        "bn2.running_var": np.array([0.3, 0.0], np.float32),
        "fc.bias": np.array([np.inf, 0.1], np.float32),
        "relu.quantized.clip": np.array(0.1, np.float32),
    }
    rounded = rounded_side(side, 16)
    changed = {name for name in side if rounded[name].tobytes() != side[name].tobytes()}
    assert changed == {"bn.weight", "bn2.running_var"}
    for name in changed:
        np.testing.assert_array_equal(rounded[name], side[name].astype(np.float16))
    assert that_fit_half(rounded) == {*changed}
    assert all(tensor.dtype == np.float32 for tensor in rounded.values())
    assert rounded_side(side, 32) is side
    again = rounded_side(rounded, 16)
    assert all(again[name].tobytes() == rounded[name].tobytes() for name in side)


@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, 1.0, 0.1, 65504.0, 65520.0, 1e-8, 2.0**-24, math.nan, math.inf]),
            max_size=5,
        ),
        max_size=6,
    )
)
def test_those_that_fit_half_are_found_as_one_by_one(values: list[list[float]]) -> None:
    side = {str(place): np.array(each, np.float32) for place, each in enumerate(values)}
    side["clip"] = np.array(0.5, np.float32)
    with np.errstate(over="ignore"):
        expected = {
            name
            for name, tensor in side.items()
            if np.array_equal(tensor.astype(np.float16).astype(np.float32), tensor)
        }
    assert that_fit_half(side) == expected
