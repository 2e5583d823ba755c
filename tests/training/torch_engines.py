"""The torch engine, loaded and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.quantized import Layers
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import Batch
from fedmpq.training.torch_engine import TorchEngine

Made = Callable[..., Any]
PAPER = TrainingPlan(update="paper", learning_rate=0.1)
DRAWS = Draws(seed=1, client=2, round=3)
CARRIED = TrainingPlan(update="carried", learning_rate=0.1, code_learning_rate=0.02)


def batch_of(data: Dataset, start: int, stop: int) -> Batch:
    return data.images[start:stop], data.labels[start:stop]


def loaded(model: Any, plan: TrainingPlan, draws: Draws = DRAWS) -> TorchEngine:
    engine = TorchEngine()
    engine.load(model.graph, model.layers, model.side, plan, draws)
    return engine


def trained(model: Any, plan: TrainingPlan, data: Dataset, draws: Draws = DRAWS) -> TorchEngine:
    engine = loaded(model, plan, draws)
    engine.train_epoch([batch_of(data, 0, 8), batch_of(data, 8, 16)])
    engine.train_epoch([batch_of(data, 4, 16)])
    return engine


def same_codes(left: Layers, right: Layers) -> bool:
    return all(np.array_equal(left[name].codes, right[name].codes) for name in left)


def places(engine: TorchEngine) -> dict[str, NDArray[np.int64]]:
    """256 times the codes, plus what the carried rule keeps beside them."""
    fractions, layers = engine.fractions(), engine.layers()
    return {
        name: 256 * layer.codes.astype(np.int64)
        + (fractions[name].reshape(layer.codes.shape) if name in fractions else 0)
        for name, layer in layers.items()
    }


def same_places(left: TorchEngine, right: TorchEngine) -> bool:
    ours, theirs = places(left), places(right)
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)
