"""Classifiers of torchvision, of few classes on small images: traced, trained for a step and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.export.exporting import export_model
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.trace import trace
from fedmpq.system.torchvision_ops import import_torchvision
from fedmpq.training.engine import make_engine
from fedmpq.training.native_plan import units_of

CLASSES = 3
WITHOUT_HELPERS: dict[str, Any] = {"aux_logits": False, "init_weights": False}
TRACED: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "vgg11_bn": (64, {}),
    "inception_v3": (96, WITHOUT_HELPERS),
    "mnasnet0_5": (64, {}),
}
"""Too large to train in a test, or made of nothing that the others have not."""
TRAINED: dict[str, tuple[int, dict[str, Any]]] = {
    "squeezenet1_1": (48, {}),
    "shufflenet_v2_x0_5": (48, {}),
    "googlenet": (48, WITHOUT_HELPERS),
    "densenet121": (32, {}),
}


def traced(name: str, size: int, settings: dict[str, Any], device: str) -> tuple[torch.nn.Module, Graph]:
    torch.manual_seed(0)
    with torch.device(device):
        module = getattr(import_torchvision().models, name)(weights=None, num_classes=CLASSES, **settings)
        image = torch.zeros(1, 3, size, size)
    return module, trace(module, image, name=name, input_scale=1 / 64, input_zero_point=120)


def quantized(module: torch.nn.Module, graph: Graph) -> tuple[Layers, Side]:
    weights, side = initial_state(module, graph)
    layers = {name: QuantizedLayer.from_weights(each, 4, "max", False) for name, each in weights.items()}
    return layers, side


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_it_becomes_a_graph_that_the_native_engine_can_train(name: str) -> None:
    """Traced without memory for its weights, written and read, cut into units."""
    _, graph = traced(name, *TRACED[name], "meta")
    assert Graph.from_bytes(graph.to_bytes()) == graph
    assert graph.shapes[graph.output] == (CLASSES,)
    assert units_of(graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_changes_every_layer_and_it_is_exported_to_the_bit(name: str, tmp_path: Path) -> None:
    """A file that is not equal to the integer forward is an error and does not appear."""
    module, graph = traced(name, *TRAINED[name], "cpu")
    layers, side = quantized(module, graph)
    random, size = np.random.default_rng(1), graph.input.height
    images = random.integers(0, 256, (4, size, size, 3)).astype(np.uint8)
    engine = make_engine("native", threads=2)
    plan = TrainingPlan(update="carried", learning_rate=0.01, code_learning_rate=0.05)
    engine.load(graph, layers, side, plan, Draws(seed=1, client=2, round=3))
    assert np.isfinite(engine.train_epoch([(images, np.arange(4) % CLASSES)]).loss)
    fractions, trained = engine.fractions(), engine.layers()
    for node in graph.layers:
        moved = fractions[node.name].any() or (trained[node.name].codes != layers[node.name].codes).any()
        assert moved, node.name
    model = DeployedModel(graph, layers, side, tuple("abc"))
    assert export_model(model, tmp_path / "model.onnx", target="onnx").path.stat().st_size > 0
