"""The estimate of a round's memory beside what the native engine allocates."""

from __future__ import annotations

import pytest

from bench.workload import make_workload
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import INPUT, Graph
from fedmpq.model.randomness import Draws
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.native_plan import LITTLE, units_of
from fedmpq.training.needs import forward_needs, products_of, step_memory, training_needs
from tests.training.small_graphs import GRAPHS, Net, random_batch, random_state


def allocated(graph: Graph, images: int) -> int:
    engine = NativeEngine(1)
    engine.load(graph, *random_state(graph), TrainingPlan(), Draws(1, 2, 3))
    engine.train_epoch([random_batch(graph, images)])
    return engine._arena.block.nbytes


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_takes_as_much_as_estimated(name: str) -> None:
    graph = GRAPHS[name]()
    estimate = step_memory(graph, units_of(graph), 32)
    # These steps need little, so nearly all of the estimate is room for what they could do without.
    assert 0.99 * (estimate - LITTLE) < allocated(graph, 32) <= estimate


@pytest.mark.slow
def test_a_large_step_takes_as_much_as_estimated() -> None:
    work = make_workload("resnet20", 64)
    estimate = step_memory(work.graph, units_of(work.graph), 64)
    assert 0.85 * estimate < allocated(work.graph, 64) <= estimate


def test_products_are_counted() -> None:
    net = Net(3, 4, 5)
    graph = net.graph(net.conv(INPUT, 2, (3, 3)))
    assert products_of(graph) == 4 * 5 * 2 * 27 + 5 * 40 + sum(
        4 * 5 * 2 for node in graph.nodes if node.inputs != (INPUT,) and len(graph.shapes[node.name]) == 3
    ) + sum(40 if node.name.startswith("flatten") else 0 for node in graph.nodes)
    assert training_needs(graph, TrainingPlan(epochs=7), 10, 1).products == 3 * 7 * 10 * products_of(graph)


def test_a_small_graph_may_need_more_than_any_board_has() -> None:
    """156 bytes that once asked for 96 GiB."""
    net = Net(1, 4096, 4096)
    graph = net.graph(net.conv(INPUT, 16, (1, 1), padding=(0, 0), stride=(64, 64), norm=False, bias=True))
    assert len(graph.to_bytes()) < 300
    plan = TrainingPlan(batch_size=1 << 20)
    assert training_needs(graph, plan, 1 << 14, 1).memory > 96 << 30
    assert forward_needs(graph, 1 << 14, 1 << 14, 1).memory > 96 << 30
    assert training_needs(graph, TrainingPlan(batch_size=2), 2, 1).memory < 1 << 30
