"""The native engine on numbers at the end of their range, and beyond: survived, or refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.model.activations import MIN_CLIP
from fedmpq.model.graph import Graph
from fedmpq.training.engine import TrainingError
from fedmpq.training.native_engine import NativeEngine
from tests.training.native_outcomes import CARRIED, PAPER, loaded, outcome, same_codes, small_model
from tests.training.small_graphs import GRAPHS, random_batch
from tests.training.watched_calls import Watched

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_rate_that_breaks_the_model_names_the_step() -> None:
    model = small_model("residuals")
    engine = loaded(model, replace(PAPER, learning_rate=1e38))
    with pytest.raises(TrainingError, match=r"in training step [01]; lower the learning rate \(now 1e\+38\)"):
        outcome(engine, model[0], (8, 8))


def test_an_infinite_loss_names_the_step() -> None:
    graph, layers, side = small_model("residuals")
    side[f"{graph.output}.bias"][:] = [3e38, -3e38, -3e38, -3e38, -3e38]
    with pytest.raises(TrainingError, match=r"the loss is (inf|nan) in training step 0; lower"):
        outcome(loaded((graph, layers, side)), graph, (8,))


@pytest.mark.parametrize("plan", [PAPER, CARRIED], ids=["paper", "carried"])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_names_the_layer_and_leaves_its_codes(
    monkeypatch: pytest.MonkeyPatch, plan: TrainingPlan, momentum_bits: int, bad: float
) -> None:
    model = small_model("residuals")
    own, victim = bound.conv_backward_weights, model[0].layers[3]
    shape = model[0].weight_shape(victim.name)

    def spoiling(conv: Any, codes: Any, errors: Any, scale: Any, threads: int, gradient: Any) -> Call:
        def spoil(_: None) -> None:
            if (conv.out_channels, conv.channels, conv.stride_h) == (shape[0], shape[1], 2):
                gradient.array[-1] = bad

        return Watched(own(conv, codes, errors, scale, threads, gradient), after=spoil)

    monkeypatch.setattr(bound, "conv_backward_weights", spoiling)
    engine = loaded(model, replace(plan, momentum_bits=momentum_bits))
    with pytest.raises(
        TrainingError, match=r"gradient of layer 'conv2d\d+' is not finite in training step 0"
    ):
        outcome(engine, model[0], (8,))
    for node in model[0].layers[:4]:
        np.testing.assert_array_equal(engine.layers()[node.name].codes, model[1][node.name].codes)


@pytest.mark.slow
@pytest.mark.parametrize("float_errors", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_numbers_at_the_end_of_their_range_are_survived_or_named(name: str, float_errors: bool) -> None:
    """Whichever side tensor is huge, training goes on with finite numbers or says when and where it broke."""
    graph, layers, side = small_model(name)
    endings = set()
    for tensor in graph.side_shapes():
        for huge in (3e38, 1e30, -1e20):
            changed = {**side, tensor: np.full_like(side[tensor], huge)}
            endings.add(survived(loaded((graph, layers, changed), float_errors=float_errors), graph))
    assert endings == {True, False}


def survived(engine: NativeEngine, graph: Graph) -> bool:
    try:
        outcome(engine, graph, (4, 4))
    except TrainingError as error:
        if "in training step" not in str(error):
            raise
        return False
    assert all(np.isfinite(tensor).all() for tensor in engine.side().values())
    return True


@pytest.mark.parametrize("scale", [1e-30, 1e30, 3e38])
def test_huge_and_tiny_steps_are_survived_or_named(scale: float) -> None:
    graph, layers, side = small_model("bottlenecks")
    for name, layer in layers.items():
        changed = {**layers, name: replace(layer, step=np.asarray(scale, dtype=np.float32))}
        survived(loaded((graph, changed, side)), graph)


def test_errors_too_small_for_a_scale_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits so far apart that softmax leaves 1e-38: neither a division by zero nor a move."""
    own, inverses = bound.quantize_error, []

    def watching(error: Any, images: int, count: int, inverse: Any, *rest: Any) -> Call:
        call = own(error, images, count, inverse, *rest)
        return Watched(call, after=lambda _: inverses.append(inverse.value))

    monkeypatch.setattr(bound, "quantize_error", watching)
    graph, layers, side = small_model("convolutions")
    side[f"{graph.output}.bias"][:] = [300.0, 0.0, 0.0, 0.0, 0.0]
    plan = replace(CARRIED, weight_decay=0.0, lasso=0.0)
    engine = loaded((graph, layers, side), plan)
    images, _ = random_batch(graph, 6)
    result = engine.train_epoch([(images, np.zeros(6, np.int64))] * 2)
    assert result.loss == pytest.approx(0.0, abs=1e-6)
    assert set(inverses) == {0.0}
    assert same_codes(engine.layers(), layers)


def test_clips_stay_positive() -> None:
    graph, layers, side = small_model("residuals")
    engine = loaded((graph, layers, side), replace(CARRIED, learning_rate=10.0, weight_decay=0.9))
    outcome(engine, graph, (8,))
    clips = [tensor for name, tensor in engine.side().items() if name.endswith(".clip")]
    assert min(float(clip) for clip in clips) == MIN_CLIP


def test_side_tensors_follow_sgd() -> None:
    """Momentum and coupled decay as torch.optim.SGD has them."""
    graph, layers, side = small_model("residuals")
    engine = loaded((graph, layers, side), replace(PAPER, learning_rate=0.05, weight_decay=0.01))
    name = "batchnorm1.weight"
    expected = torch.nn.Parameter(torch.tensor(side[name]))
    optimizer = torch.optim.SGD([expected], lr=0.05, momentum=0.9, weight_decay=0.01)
    random = np.random.default_rng(0)
    for _ in range(5):
        gradient = random.normal(size=8).astype(np.float32)
        expected.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        engine._side.gradients[engine._side.places[name]] = gradient
        engine._side.update()
        np.testing.assert_allclose(engine.side()[name], expected.detach().numpy(), rtol=1e-6)
