"""Layers that are frozen: training leaves their parameters as they are, and the rest learns as ever."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpq
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model import zoo
from fedmpq.model.graph import BatchNorm, Graph, GraphError, Quantize
from fedmpq.model.trace import trace
from fedmpq.training.engine import make_engine
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.needs import training_needs
from tests.training.native_outcomes import CARRIED, DRAWS, PAPER, Model
from tests.training.small_graphs import GRAPHS, random_batch, random_state


def frozen_model(name: str, frozen: Iterable[str]) -> Model:
    graph = GRAPHS[name]()
    held = set(frozen)
    nodes = tuple(replace(node, frozen=node.name in held) for node in graph.nodes)
    graph = replace(graph, nodes=nodes)
    return graph, *random_state(graph)


def with_parameters(graph: Graph) -> list[str]:
    layers = {node.name for node in graph.layers}
    return [node.name for node in graph.nodes if node.name in layers or isinstance(node.op, BatchNorm)]


@pytest.mark.parametrize("name", sorted(GRAPHS))
@pytest.mark.parametrize("plan", [CARRIED, PAPER], ids=["carried", "paper"])
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_frozen_parameters_stay_and_others_move(name: str, plan: TrainingPlan, engine: str) -> None:
    frozen = with_parameters(GRAPHS[name]())[::2]
    graph, layers, side = frozen_model(name, frozen)
    made = make_engine(engine, 1)
    made.load(graph, layers, side, replace(plan, code_learning_rate=0.5, learning_rate=0.5), DRAWS)
    made.train_epoch([random_batch(graph, 6, seed) for seed in range(3)])
    after, after_side = made.layers(), made.side()
    moved = {key for key in layers if not np.array_equal(after[key].codes, layers[key].codes)}
    assert not moved & graph.frozen_layers
    for key in graph.frozen_side:
        assert np.array_equal(after_side[key], side[key]), key
    learnt = {f"{key}.bias" for key in with_parameters(graph)} & side.keys() - graph.frozen_side
    assert all(not np.array_equal(after_side[key], side[key]) for key in learnt)
    assert moved or not graph.layers[0:] or graph.frozen_layers == set(layers)


def test_the_errors_pass_through_a_frozen_layer_unchanged() -> None:
    """The first layer learns the same in its first step, whether the ones behind it are frozen or not."""
    name = sorted(GRAPHS)[0]
    graph = GRAPHS[name]()
    first = graph.layers[0].name
    codes = []
    for frozen in ([], [node.name for node in graph.layers[1:]]):
        made = make_engine("native", 1)
        made.load(*frozen_model(name, frozen), replace(CARRIED, code_learning_rate=0.5), DRAWS)
        made.train_epoch([random_batch(graph, 6, 0)])
        codes.append(made.layers()[first].codes)
    assert np.array_equal(codes[0], codes[1])


def prefix_of(name: str, share: float) -> list[str]:
    """The first of the nodes with parameters."""
    nodes = with_parameters(GRAPHS[name]())
    return nodes[: round(share * len(nodes))]


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_what_is_learnt_learns_the_same_whether_or_not_errors_go_further_back(
    name: str, share: float
) -> None:
    """In a first step, to the bit: with nothing frozen, errors go all the way."""
    engines = []
    for frozen in ([], prefix_of(name, share)):
        engines.append(NativeEngine(1))
        graph, layers, side = frozen_model(name, frozen)
        engines[-1].load(graph, layers, side, replace(CARRIED, code_learning_rate=0.5), DRAWS)
        engines[-1].train_epoch([random_batch(graph, 6, 0)])
    (all_layers, some_layers), (all_side, some_side) = zip(
        *((e.layers(), e.side()) for e in engines), strict=True
    )
    for key in layers:
        expected = layers if key in graph.frozen_layers else all_layers
        assert np.array_equal(some_layers[key].codes, expected[key].codes), key
    for key in side:
        expected_side = side if key in graph.frozen_side else all_side
        assert np.array_equal(some_side[key], expected_side[key]), key


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_nothing_goes_backward_below_the_lowest_layer_that_learns(name: str) -> None:
    """Of a network whose last layer alone learns, one unit runs backward, and a step takes less memory."""
    *frozen, last = with_parameters(GRAPHS[name]())
    sizes = []
    for held in ([], frozen):
        graph, layers, side = frozen_model(name, held)
        engine = NativeEngine(1)
        engine.load(graph, layers, side, CARRIED, DRAWS)
        engine.train_epoch([random_batch(graph, 32, 0)])
        sizes.append(engine._arena.block.nbytes)
    units: list[Any] = list(engine._steps[32]._learning)
    learning = [unit.bound.unit for unit in units]
    below = {node.name for node in graph.nodes} & graph.unlearnt
    assert not below & {unit.output for unit in learning}
    assert {clip for clip in graph.frozen_side if clip.endswith(".clip")} == {
        f"{each.name}.clip" for each in graph.nodes if each.name in below and isinstance(each.op, Quantize)
    }
    assert any(last in (unit.output, getattr(getattr(unit, "node", None), "name", "")) for unit in learning)
    assert sizes[1] <= sizes[0]


@pytest.mark.slow
def test_a_deep_network_whose_head_alone_learns_takes_a_part_of_the_memory() -> None:
    sizes, backward = [], []
    for held in (False, True):
        module = zoo.build("resnet8", classes=10, channels=3)
        for key, parameter in module.named_parameters():
            parameter.requires_grad = not held or key.startswith("fc.")
        graph = trace(module, torch.zeros(1, 3, 16, 16), name="n", input_scale=1 / 64, input_zero_point=100)
        engine = NativeEngine(1)
        engine.load(graph, *random_state(graph), CARRIED, DRAWS)
        engine.train_epoch([random_batch(graph, 16, 0)])
        sizes.append(engine._arena.block.nbytes)
        backward.append(len(engine._steps[16]._learning))
        needs = training_needs(graph, CARRIED, 16, 1)
    assert backward[1] == 1 < backward[0]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[1] < needs.memory


def network() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("digits_cnn", classes=3, channels=1)


def traced(module: nn.Module) -> Graph:
    return trace(module, torch.zeros(1, 1, 6, 5), name="n", input_scale=1 / 64, input_zero_point=100)


def test_tracing_sees_what_needs_no_gradient_and_other_graphs_keep_their_bytes() -> None:
    module = network()
    plain = traced(module)
    assert not plain.frozen_layers
    assert plain.to_bytes()[:2] == b"\x08\x01", "format version 1"
    for parameter in module.get_submodule("layer1").parameters():
        parameter.requires_grad = False
    graph = traced(module)
    assert graph.frozen_layers == {node.name for node in graph.layers if node.name.startswith("layer1")}
    assert "layer1.0.bn1.weight" in graph.frozen_side
    assert "layer1.0.bn1.running_mean" not in graph.frozen_side
    assert graph.to_bytes()[:2] == b"\x08\x02", "boards that cannot keep it frozen refuse it"
    assert Graph.from_bytes(graph.to_bytes()) == graph
    assert graph.id != plain.id


def test_only_what_has_parameters_can_be_frozen() -> None:
    graph = traced(network())
    relu = next(index for index, node in enumerate(graph.nodes) if node.name.startswith("relu"))
    nodes = list(graph.nodes)
    nodes[relu] = replace(nodes[relu], frozen=True)
    with pytest.raises(GraphError, match="is frozen and has no parameters"):
        replace(graph, nodes=tuple(nodes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"profile": "paper"}, {"method": "fp32"}], ids=["best", "paper", "fp32"]
)
def test_a_frozen_network_but_for_its_head(settings: dict[str, Any]) -> None:
    module = network()
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name.startswith("fc.")
    images = np.random.default_rng(0).integers(0, 256, (60, 6, 5), dtype=np.uint8)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = fedmpq.simulate(
        "tests.training.test_frozen:head_only" if settings.get("method") else module,
        (images, np.arange(60) % 3),
        budgets=[2, 8],
        rounds=2,
        epochs=1,
        batch_size=8,
        participation=1.0,
        alpha=float("inf"),
        workers=1,
        progress=False,
        **settings,
    )
    for name, tensor in run.model.weights.items():
        same = np.array_equal(tensor, before[f"{name}.weight"].numpy())
        assert same == (name != "fc"), name
    assert not np.array_equal(run.model.side["fc.bias"], before["fc.bias"].numpy())
    for name in run.graph.frozen_side & before.keys():
        np.testing.assert_allclose(run.model.side[name], before[name].numpy(), rtol=1e-6)


def head_only(classes: int, channels: int) -> nn.Module:
    """As a user's function: everything frozen but the last layer."""
    module = network()
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name.startswith("fc.")
    return module
