"""The torch engine: what it keeps, what it repeats, what it refuses, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model import integer_forward
from fedmpq.model.activations import MIN_CLIP
from fedmpq.model.graph import INPUT, Conv2d, Linear
from fedmpq.model.integer_program import compile_program
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.model.state_checks import ProgramError
from fedmpq.training import torch_losses, torch_ops
from fedmpq.training.engine import EpochResult
from fedmpq.training.local_round import batches
from fedmpq.training.torch_engine import TorchEngine, _Network, _TrainedLayer, full_precision_logits
from tests.training.torch_engines import (
    CARRIED,
    DRAWS,
    PAPER,
    Made,
    batch_of,
    loaded,
    places,
    same_codes,
    same_places,
    trained,
)
from tests.training.torch_products import integer_products

pytestmark = pytest.mark.usefixtures("one_thread")


def reachable(root: object) -> Iterator[np.ndarray | torch.Tensor]:
    """Every array and tensor that attributes, containers and closures lead to."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray | torch.Tensor):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend(item)
        else:
            waiting.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            waiting.extend(cell.cell_contents for cell in getattr(item, "__closure__", None) or ())


def is_float(array: np.ndarray | torch.Tensor) -> bool:
    return array.is_floating_point() if isinstance(array, torch.Tensor) else array.dtype.kind == "f"


def size_of(array: np.ndarray | torch.Tensor) -> int:
    return array.numel() if isinstance(array, torch.Tensor) else array.size


@pytest.mark.parametrize("plan", [PAPER, CARRIED])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
def test_codes_are_the_only_weights_kept(
    make_model: Made, make_data: Made, plan: TrainingPlan, per_channel: bool, momentum_bits: int
) -> None:
    model = make_model(per_channel=per_channel)
    engine = trained(model, replace(plan, momentum_bits=momentum_bits), make_data(16))
    weights = sum(model.graph.layer_sizes)
    kept = list(reachable(engine))
    codes = sum(size_of(array) for array in kept if isinstance(array, np.ndarray) and array.dtype == np.uint8)
    assert codes == weights
    floats = sum(size_of(array) for array in kept if is_float(array))
    side = sum(tensor.size for tensor in model.side.values())
    # Per weight: its momentum, if that was asked for. Per channel: step and rate. Per layer: a Lasso table.
    channels = sum(model.graph.weight_shape(node.name)[0] for node in model.graph.layers)
    blocks = sum(-(-size // 128) for size in model.graph.layer_sizes)
    small = 2 * side + 2 * channels + len(model.layers) * 2**3 + blocks
    assert floats <= small + (weights if momentum_bits == 32 else 0)
    if momentum_bits == 32:
        assert floats > weights


def test_the_tape_keeps_packed_codes_for_products(digits: Any) -> None:
    """Two 4-bit codes a byte, shared by all layers that read them; the image and averages one byte each."""
    graph, count = digits.graph, 9
    layers = digits.layers(4, "max")
    engine = TorchEngine()
    engine.load(graph, layers, digits.side, PAPER, Draws(0, 0, 0))
    side = {name: torch.tensor(tensor) for name, tensor in digits.side.items()}
    network = _Network(graph, side, lambda name: engine._layers[name].weight(), training=True)
    with torch.no_grad():
        network.forward(digits.train.images[:count])
    kept: dict[int, torch.Tensor] = {}
    for node, backward in network.tape:
        if isinstance(node.op, Conv2d | Linear):
            closed = [cell.cell_contents for cell in backward.__closure__ or ()]
            for tensor in reachable([item for item in closed if item is not network]):
                assert isinstance(tensor, torch.Tensor)
                assert tensor.dtype == torch.uint8
                kept[tensor.data_ptr()] = tensor
    read = {node.inputs[0] for node in graph.layers}
    whole = {INPUT, "flatten"}
    expected = sum(
        math.ceil(count * math.prod(graph.shapes[name]) / (1 if name in whole else 2)) for name in read
    )
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == expected


@pytest.mark.parametrize("plan", [PAPER, CARRIED])
def test_the_same_draws_repeat_a_run_to_the_bit(
    make_model: Made, make_data: Made, plan: TrainingPlan
) -> None:
    model, data = make_model(), make_data(16)
    first, again = trained(model, plan, data), trained(model, plan, data)
    assert same_places(first, again)
    assert not same_places(first, loaded(model, plan))
    for name, tensor in first.side().items():
        assert np.array_equal(tensor, again.side()[name]), name


@pytest.mark.parametrize("draws", [Draws(9, 2, 3), Draws(1, 9, 3), Draws(1, 2, 9)])
def test_another_seed_client_or_round_draws_otherwise(
    make_model: Made, make_data: Made, draws: Draws
) -> None:
    model, data = make_model(), make_data(16)
    assert not same_places(trained(model, CARRIED, data), trained(model, CARRIED, data, draws))


def test_loading_starts_afresh(make_model: Made, make_data: Made) -> None:
    """Neither momentum nor the count of steps outlives a round."""
    model, data = make_model(), make_data(16)
    engine = trained(model, CARRIED, data)
    expected = engine.layers()
    engine.load(model.graph, model.layers, model.side, CARRIED, DRAWS)
    engine.train_epoch([batch_of(data, 0, 8), batch_of(data, 8, 16)])
    engine.train_epoch([batch_of(data, 4, 16)])
    assert same_codes(engine.layers(), expected)


def test_what_was_handed_over_does_not_change(make_model: Made, make_data: Made) -> None:
    model, data = make_model(), make_data(16)
    codes = {name: layer.codes.copy() for name, layer in model.layers.items()}
    side = {name: tensor.copy() for name, tensor in model.side.items()}
    engine = loaded(model, CARRIED)
    engine.train_epoch([batch_of(data, 0, 8)])
    between, side_between = engine.layers(), engine.side()
    snapshot = {name: layer.codes.copy() for name, layer in between.items()}
    side_snapshot = {name: tensor.copy() for name, tensor in side_between.items()}
    engine.train_epoch([batch_of(data, 8, 16)])
    for name in codes:
        assert np.array_equal(model.layers[name].codes, codes[name])
        assert np.array_equal(between[name].codes, snapshot[name])
    for name in side:
        assert np.array_equal(model.side[name], side[name])
        assert np.array_equal(side_between[name], side_snapshot[name])
    trained_codes = engine.layers()["stem"].codes.copy()
    model.layers["stem"].codes[:] = 0
    assert np.array_equal(engine.layers()["stem"].codes, trained_codes)
    fresh = loaded(model, CARRIED)
    model.layers["stem"].codes[:] = 1
    assert not fresh.layers()["stem"].codes.any()


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_arrays_that_cannot_be_written_will_do(
    make_model: Made, make_data: Made, bits: int, per_channel: bool
) -> None:
    """Arrays read from a message are views of its bytes."""
    model = make_model(bits=bits, per_channel=per_channel)
    for layer in model.layers.values():
        layer.codes.setflags(write=False)
        layer.step.setflags(write=False)
    for tensor in model.side.values():
        tensor.setflags(write=False)
    trained(model, PAPER, make_data(16))
    weights = {name: layer.weights() for name, layer in model.layers.items()}
    for weight in weights.values():
        weight.setflags(write=False)
    full_precision_logits(model.graph, weights, model.side, make_data(4).images)


def reference_step(
    layer: QuantizedLayer, gradient: NDArray[np.float32], plan: TrainingPlan, index: int, share: float
) -> NDArray[np.int64]:
    """Both rules weight by weight, in step 0 of the round: 256 times the code, plus the carried fraction."""
    bits, flat, out = layer.bits, layer.codes.reshape(-1), []
    steps = np.broadcast_to(
        layer.step.reshape(-1, 1), (layer.step.size, flat.size // layer.step.size)
    ).reshape(-1)
    middle, low, high = 2 ** (bits - 1), 1 if bits == 8 else 0, 2**bits - 1
    zero = 128 if bits == 8 else (2**bits - 1) / 2
    sizes = [int(c) - middle if c >= middle else middle - 1 - int(c) for c in flat]
    counts = [sum(size >> plane & 1 for size in sizes) for plane in range(bits - 1)]
    draw = DRAWS.uniform(flat.size, Purpose.UPDATE, layer=index, step=0)
    lasso_draw = DRAWS.uniform(flat.size, Purpose.LASSO, layer=index, step=0)
    strength = plan.learning_rate * plan.lasso * share

    def pull(size: int) -> float:
        return strength * sum(2.0**i / math.sqrt(n) for i, n in enumerate(counts) if n and size >> i & 1)

    for i, code in enumerate(int(c) for c in flat):
        direction = float(gradient.reshape(-1)[i]) + plan.weight_decay * float(steps[i]) * (code - zero)
        if plan.update == "paper":
            x = plan.learning_rate * float(steps[i]) * abs(direction)
            q = [round(math.log2(x)) + 2 * j - 1 for j in range(1, bits + 1)]
            move = sum(2 ** (e - 1) for e in q if 1 <= e <= bits) + (
                draw[i] < sum(2.0 ** (e - 1) for e in q if e <= 0)
            )
            move = 2**bits - 1 if q[-1] > bits else move
            code = min(max(code - move if direction > 0 else code + move, low), high)
            size = code - middle if code >= middle else middle - 1 - code
            towards = min(math.floor(pull(size) + float(lasso_draw[i])), size)
            place = 256 * (code - towards if code >= middle else code + towards)
        else:
            x = 256 * plan.code_learning_rate * direction / float(steps[i])
            place = 256 * code - math.floor(x + float(draw[i]))
            place = min(max(place, 256 * low - 128), 256 * high + 127)
        out.append(place)
    return np.array(out, np.int64).reshape(layer.codes.shape)


@pytest.mark.parametrize("plan", [PAPER, CARRIED])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_one_step_is_the_algorithm(
    make_model: Made,
    make_data: Made,
    monkeypatch: pytest.MonkeyPatch,
    plan: TrainingPlan,
    per_channel: bool,
    bits: int,
) -> None:
    """Gradient, decay, draws and Lasso of one batch, recomposed from the formulas."""
    model, data = make_model(bits=bits, per_channel=per_channel), make_data(16)
    # Large enough a Lasso and decay that leaving them out, or scaling them otherwise, shows.
    plan = replace(plan, lasso=40.0, weight_decay=0.5)
    seen: dict[str, NDArray[np.float32]] = {}
    backward = torch_ops.backward_product

    def watch(packed: Any, scale: float, weight: Any, op: Any, gradient: Any, first: bool) -> Any:
        source, weights = backward(packed, scale, weight, op, gradient, first)
        name = next(node.name for node in model.graph.layers if node.op is op)
        seen[name] = weights.contiguous().numpy().copy()
        return source, weights

    monkeypatch.setattr(torch_ops, "backward_product", watch)
    engine = loaded(model, plan)
    engine.train_epoch([batch_of(data, 0, 16)])
    total = sum(model.graph.layer_sizes)
    for index, node in enumerate(model.graph.layers):
        layer = model.layers[node.name]
        expected = reference_step(layer, seen[node.name], plan, index, layer.codes.size / total)
        assert np.array_equal(places(engine)[node.name], expected), node.name
        assert engine.layers()[node.name].step is layer.step
        assert engine.layers()[node.name].bits == bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_layers_bound_is_its_greatest_integer_weight(bits: int) -> None:
    """What decides whether float32 carries the sums."""
    codes = np.arange(1 if bits == 8 else 0, 2**bits, dtype=np.uint8)[None, :]
    layer = QuantizedLayer(codes, bits, np.asarray(0.5, dtype=np.float32))
    weight = _TrainedLayer(0, "layer", layer, PAPER, DRAWS).weight()
    assert weight.bound == int(weight.tensor.abs().max())
    np.testing.assert_array_equal(weight.real().numpy(), layer.weights())


def test_momentum_adds_up_over_steps() -> None:
    """Three pushes of one gradient: 1, 1.9 and 2.71 times as large a move."""
    layer = QuantizedLayer(np.full((1, 4096), 128, np.uint8), 8, np.asarray(1.0, dtype=np.float32))
    plan = TrainingPlan(update="carried", code_learning_rate=1.0, weight_decay=0.0, lasso=0.0)
    held = _TrainedLayer(0, "layer", layer, plan, Draws(0, 0, 0))
    before = 128.0
    for step, factor in enumerate((1.0, 1.9, 2.71)):
        held.apply(np.full(4096, 10.0, np.float32), step)
        assert held.fractions is not None
        place = held.codes.mean() + held.fractions.mean() / 256
        assert before - place == pytest.approx(10 * factor, abs=0.05 / 256)
        before = place


def test_side_tensors_follow_sgd(make_model: Made) -> None:
    """Momentum and coupled decay as torch.optim.SGD has them."""
    model = make_model()
    engine = loaded(model, replace(PAPER, learning_rate=0.05, weight_decay=0.01))
    name = "stem_norm.weight"
    expected = torch.nn.Parameter(torch.tensor(model.side[name]))
    optimizer = torch.optim.SGD([expected], lr=0.05, momentum=0.9, weight_decay=0.01)
    random = np.random.default_rng(0)
    for _ in range(5):
        gradient = torch.from_numpy(random.normal(size=4).astype(np.float32))
        expected.grad = gradient.clone()
        optimizer.step()
        engine._update_side(name, gradient)
        np.testing.assert_allclose(engine.side()[name], expected.detach().numpy(), rtol=1e-6)


def test_clips_stay_positive(make_model: Made) -> None:
    engine = loaded(make_model(), PAPER)
    engine._update_side("sum_relu.quantized.clip", torch.tensor(1e4))
    assert engine.side()["sum_relu.quantized.clip"] == MIN_CLIP


def test_an_empty_epoch_changes_nothing(make_model: Made) -> None:
    model = make_model()
    engine = loaded(model, PAPER)
    assert engine.train_epoch([]) == EpochResult(samples=0, loss=0.0, accuracy=0.0)
    assert same_codes(engine.layers(), model.layers)
    for name, tensor in engine.side().items():
        assert np.array_equal(tensor, model.side[name])


@pytest.mark.parametrize("plan", [PAPER, CARRIED])
def test_a_batch_of_two_is_enough(make_model: Made, make_data: Made, plan: TrainingPlan) -> None:
    engine = loaded(make_model(), plan)
    result = engine.train_epoch([batch_of(make_data(4), 0, 2)])
    assert result.samples == 2
    assert math.isfinite(result.loss)
    assert all(np.isfinite(tensor).all() for tensor in engine.side().values())


def test_means_are_over_samples_not_batches(
    make_model: Made, make_data: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 16 and 2 with losses of 16 and 2 and one right answer each."""
    monkeypatch.setattr(
        torch_losses,
        "cross_entropy",
        lambda logits, labels: (float(len(labels)), 1, torch.zeros_like(logits)),
    )
    data = make_data(18)
    result = loaded(make_model(), PAPER).train_epoch([batch_of(data, 0, 16), batch_of(data, 16, 18)])
    assert result.samples == 18
    assert result.loss == pytest.approx((16 * 16 + 2 * 2) / 18)
    assert result.accuracy == pytest.approx(2 / 18)


def test_a_model_that_does_not_fit_its_graph_is_refused(make_model: Made) -> None:
    model = make_model()
    missing = {name: layer for name, layer in model.layers.items() if name != "wide"}
    with pytest.raises(ProgramError, match="'wide' is missing"):
        TorchEngine().load(model.graph, missing, model.side, PAPER, Draws(0, 0, 0))


def digits_epochs(digits: Any, layers: Layers, plan: TrainingPlan) -> tuple[list[EpochResult], TorchEngine]:
    draws = Draws(0, 0, 1)
    engine = TorchEngine()
    engine.load(digits.graph, layers, digits.side, plan, draws)
    zero_point = digits.graph.input.zero_point
    results = [
        engine.train_epoch(batches(digits.train, plan, draws, epoch, zero_point))
        for epoch in range(plan.epochs)
    ]
    return results, engine


def integer_accuracy(digits: Any, layers: Layers, side: Side) -> float:
    program = compile_program(digits.graph, layers, side)
    logits = integer_forward.logits(program, digits.test.images, products=integer_products)
    return float(np.mean(logits.argmax(axis=1) == digits.test.labels))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "rule", "bits", "momentum_bits"),
    [("paper", "max", 8, 32), ("paper", "max", 4, 8), ("carried", "least_error", 4, 32)],
)
def test_both_rules_learn_digits(digits: Any, update: Any, rule: Any, bits: int, momentum_bits: int) -> None:
    plan = TrainingPlan(
        epochs=3,
        batch_size=32,
        update=update,
        learning_rate=0.2,
        code_learning_rate=0.1,
        momentum_bits=momentum_bits,
        prune_density=None,
    )
    results, engine = digits_epochs(digits, digits.layers(bits, rule), plan)
    losses = [result.loss for result in results]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3 * losses[0]
    assert results[-1].accuracy > 0.9
    assert integer_accuracy(digits, engine.layers(), engine.side()) > 0.8


def test_full_precision_logits_agree_with_the_integer_program(digits: Any) -> None:
    """On weights that lie on the grid both are one model, but for the rounding of biases to integers."""
    layers = digits.layers(8, "max")
    weights = {name: layer.weights() for name, layer in layers.items()}
    images = digits.test.images[:100]
    by_floats = full_precision_logits(digits.graph, weights, digits.side, images, batch=30)
    by_integers = integer_forward.logits(compile_program(digits.graph, layers, digits.side), images)
    assert by_floats.shape == by_integers.shape
    spread = float(by_integers.std())
    assert float(np.abs(by_floats - by_integers).mean()) < 0.02 * spread
    assert full_precision_logits(digits.graph, weights, digits.side, images[:0]).shape == (0, 10)
