"""The native engine on small models, and what it has made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import Engine, EpochResult
from fedmpq.training.native_engine import NativeEngine
from tests.training.small_graphs import GRAPHS, random_batch, random_state

ROOT = Path(__file__).parents[2]
DRAWS = Draws(seed=1, client=2, round=3)
PAPER = TrainingPlan(update="paper", learning_rate=0.1, momentum_bits=8)
CARRIED = TrainingPlan(update="carried", learning_rate=0.1, code_learning_rate=0.05)


Model = tuple[Graph, Layers, Side]


def loaded(model: Model, plan: TrainingPlan = CARRIED, draws: Draws = DRAWS, **options: Any) -> NativeEngine:
    engine = NativeEngine(**{"threads": 1, **options})
    graph, layers, side = model
    engine.load(graph, layers, side, plan, draws)
    return engine


def small_model(name: str, **options: Any) -> Model:
    graph = GRAPHS[name]()
    return graph, *random_state(graph, **options)


Outcome = tuple[EpochResult, Layers, Side, dict[str, Any]]


def outcome(engine: Engine, graph: Graph, sizes: tuple[int, ...]) -> Outcome:
    """Result, codes, side tensors, and what the carried rule keeps beside the codes."""
    return after(engine, engine.train_epoch([random_batch(graph, n, seed) for seed, n in enumerate(sizes)]))


def after(engine: Engine, result: EpochResult) -> Outcome:
    return result, engine.layers(), engine.side(), dict(engine.fractions())


def untouched(model: Model) -> Outcome:
    """Of a model that was loaded and not trained."""
    _, layers, side = model
    fractions = {name: np.zeros(layer.codes.size, np.int8) for name, layer in layers.items()}
    return EpochResult(0, 0.0, 0.0), layers, side, fractions


def assert_same(left: Outcome, right: Outcome) -> None:
    assert left[0] == right[0]
    for name, layer in left[1].items():
        np.testing.assert_array_equal(layer.codes, right[1][name].codes, err_msg=name)
    for name, tensor in left[2].items():
        np.testing.assert_array_equal(tensor, right[2][name], err_msg=name)
    assert left[3].keys() == right[3].keys()
    for name, fractions in left[3].items():
        np.testing.assert_array_equal(fractions, right[3][name], err_msg=name)


def same_codes(left: Layers, right: Layers) -> bool:
    return all(np.array_equal(left[name].codes, right[name].codes) for name in left)
