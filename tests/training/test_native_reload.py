"""An engine that is loaded again and again trains each model as a new engine would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.quantized import Layers, QuantizedLayer
from fedmpq.model.randomness import Draws
from fedmpq.training import native_engine
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.native_step import BoundStep
from fedmpq.training.product_units import Product
from tests.training.native_outcomes import CARRIED, PAPER, Model, assert_same, loaded, outcome, small_model
from tests.training.small_graphs import GRAPHS

SIZES = (4, 4, 3)
LASSO = replace(PAPER, lasso=0.5, momentum=0.0)


def at_bits(model: Model, bits: int, seed: int) -> Model:
    """The model with other codes, of so many bits."""
    random = np.random.default_rng(seed)
    graph, layers, side = model
    changed: Layers = {
        name: QuantizedLayer(
            random.integers(1, 2**bits, layer.codes.shape).astype(np.uint8),
            bits,
            (layer.step * np.float32(1 + seed)).astype(np.float32),
        )
        for name, layer in layers.items()
    }
    moved = {name: (tensor * np.float32(1.25)).astype(np.float32) for name, tensor in side.items()}
    return graph, changed, moved


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("plan", [CARRIED, PAPER, LASSO], ids=["carried", "paper", "lasso"])
def test_the_next_client_is_trained_as_by_a_new_engine(name: str, plan: TrainingPlan) -> None:
    first = small_model(name)
    graph, *_ = first
    engine = loaded(first, plan)
    outcome(engine, graph, SIZES)
    for client, bits in ((5, 3), (6, 8), (5, 2)):
        model, draws = at_bits(first, bits, client), Draws(seed=9, client=client, round=bits)
        engine.load(*model, replace(plan, learning_rate=0.01 * bits), draws)
        fresh = loaded(model, replace(plan, learning_rate=0.01 * bits), draws)
        assert_same(outcome(engine, graph, SIZES), outcome(fresh, graph, SIZES))


@pytest.mark.parametrize("name", GRAPHS)
def test_ample_memory_changes_nothing_but_time(name: str) -> None:
    model = small_model(name)
    sizes = (6, 5, 4, 3, 6)
    assert_same(outcome(loaded(model, ample=True), model[0], sizes), outcome(loaded(model), model[0], sizes))


def test_with_ample_memory_every_layer_worth_it_keeps_its_accumulators() -> None:
    model = small_model("residuals")
    kept = {}
    for ample in (False, True):
        engine = loaded(model, ample=ample)
        outcome(engine, model[0], (4,))
        units = [unit for unit in engine._steps[4]._units if isinstance(unit, Product)]
        worth = [unit for unit in units if unit.bound.kept is not None]
        kept[ample] = sum(unit.has_room for unit in worth), len(worth)
    assert kept[True][0] == kept[True][1] > 0
    assert kept[False][0] <= kept[True][0]


def test_steps_are_bound_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []

    class Counted(BoundStep):
        def __init__(self, *given: Any) -> None:
            bound.append(given[2])
            super().__init__(*given)

    monkeypatch.setattr(native_engine, "BoundStep", Counted)
    model = small_model(next(iter(GRAPHS)))
    engine = NativeEngine(threads=1)
    for client in range(3):
        engine.load(*model, CARRIED, Draws(1, client, 1))
        outcome(engine, model[0], SIZES)
    assert sorted(bound) == sorted(set(SIZES))


@pytest.mark.parametrize(
    "plan", [PAPER, replace(CARRIED, momentum_bits=32), replace(CARRIED, momentum=0.0)], ids=str
)
def test_what_needs_other_memory_is_bound_anew(plan: TrainingPlan) -> None:
    model = small_model(next(iter(GRAPHS)))
    engine = loaded(model)
    outcome(engine, model[0], SIZES)
    draws = Draws(4, 5, 6)
    engine.load(*model, plan, draws)
    assert_same(outcome(engine, model[0], SIZES), outcome(loaded(model, plan, draws), model[0], SIZES))


def test_another_graph_is_bound_anew() -> None:
    engine = NativeEngine(threads=1)
    for name in GRAPHS:
        model = small_model(name)
        engine.load(*model, CARRIED, Draws(1, 2, 3))
        assert_same(
            outcome(engine, model[0], SIZES), outcome(loaded(model, CARRIED, Draws(1, 2, 3)), model[0], SIZES)
        )
