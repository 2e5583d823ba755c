"""One step of the native engine against the torch engine: codes, loss, statistics and every gradient.

A value that lies on the boundary of two codes, to the last bit, may fall either way, and what follows then
differs: where gradients are compared, batches on which both engines have the same codes are sought out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.model.graph import BatchNorm, Conv2d, Graph, Linear
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.training import torch_engine
from fedmpq.training.engine import Batch, EpochResult
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.native_step import NativeStep
from fedmpq.training.product_units import Logits, Product
from fedmpq.training.torch_engine import TorchEngine, _Network, _TrainedLayer
from tests.training.small_graphs import GRAPHS, random_batch, random_state
from tests.training.watched_calls import Watched

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = TrainingPlan(update="carried", lasso=0.0)
DRAWS = Draws(1, 2, 3)
Array = NDArray[np.float32]


@dataclass
class Seen:
    """What one training step has shown."""

    result: EpochResult
    side: Side
    codes: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    layers: dict[str, Array] = field(default_factory=dict)
    sides: dict[str, Array] = field(default_factory=dict)


class WatchedNative(NativeEngine):
    """Records codes and gradients, and updates nothing but running statistics."""

    seen: Seen

    def load(self, *args: Any) -> None:
        super().load(*args)
        self._side.update = self._watch_side  # type: ignore[method-assign]

    def _new_step(self, images: int) -> NativeStep:
        step = super()._new_step(images)
        for unit in step._units:
            self._watch_codes(unit)
            self._watch_layer(unit)
        step.arrange()
        return step

    def _watch_codes(self, unit: Any) -> None:
        def watched() -> None:
            target = unit.bound.target
            self.seen.codes[unit.bound.unit.output] = target.unpaired().astype(np.int64) + target.low

        if not isinstance(unit, Logits):
            unit.forward = (*unit.forward, watched)

    def _watch_layer(self, unit: Any) -> None:
        def watched() -> None:
            self.seen.layers[unit.bound.unit.node.name] = unit.learner.gradient.array.copy()

        if isinstance(unit, Product | Logits):
            unit.backward = [watched if act is unit.learner.update else act for act in unit.backward]

    def _watch_side(self) -> None:
        side = self._side
        side._stop_at_bounds()
        for name, place in side.places.items():
            self.seen.sides[name] = side.gradients[place].reshape(side._shapes[name]).copy()


class WatchedTorch(TorchEngine):
    seen: Seen

    def _update_weight(self, name: str, gradient: torch.Tensor) -> None:
        self.seen.layers[name] = gradient.contiguous().numpy().reshape(-1).copy()

    def _update_side(self, name: str, gradient: torch.Tensor) -> None:
        self.seen.sides[name] = gradient.numpy().copy()


def watched(
    engine: WatchedNative | WatchedTorch, graph: Graph, state: tuple[Layers, Side], batch: Batch, draws: Draws
) -> Seen:
    engine.load(graph, *state, PLAN, draws)
    engine.seen = Seen(EpochResult(0, 0.0, 0.0), {})
    engine.seen.result = engine.train_epoch([batch])
    engine.seen.side = engine.side()
    return engine.seen


def torch_step(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, state: tuple[Layers, Side], batch: Batch
) -> Seen:
    codes: dict[str, NDArray[np.int64]] = {}

    class Network(_Network):
        def _apply(self, node: Any, inputs: Any) -> Any:
            value, backward = super()._apply(node, inputs)
            self.note(node.name, value)
            return value, backward

        def _product_of(self, node: Any, op: Any, value: Any) -> Any:
            if node.dropout is not None:
                self.note(f"{node.name} dropped", value)
            return super()._product_of(node, op, value)

        def note(self, name: str, value: Any) -> None:
            rows = value.tensor.permute(0, 2, 3, 1) if value.tensor.ndim == 4 else value.tensor
            if value.form is not None:
                codes[name] = rows.reshape(len(rows), -1).numpy().astype(np.int64)

    monkeypatch.setattr(torch_engine, "_Network", Network)
    seen = watched(WatchedTorch(), graph, state, batch, DRAWS)
    seen.codes = codes
    return seen


@pytest.fixture(params=[(name, per_channel) for name in GRAPHS for per_channel in (False, True)])
def agreeing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Graph, tuple[Layers, Side], Batch, Seen]:
    """A graph, its state, a batch on which all codes agree, and what torch made of it."""
    name, per_channel = request.param
    graph = GRAPHS[name]()
    for seed in range(6):
        state, batch = random_state(graph, per_channel=per_channel, seed=seed), random_batch(graph, 32, seed)
        expected = torch_step(monkeypatch, graph, state, batch)
        got = watched(WatchedNative(1), graph, state, batch, DRAWS)
        different = [name for name, codes in got.codes.items() if (codes != expected.codes[name]).any()]
        if not different:
            return graph, state, batch, expected
        # Even then, nothing but the last bit of a float may be at fault.
        first = different[0]
        assert np.abs(got.codes[first] - expected.codes[first]).max() == 1
        assert np.mean(got.codes[first] != expected.codes[first]) < 1e-3
    pytest.fail("the engines have different codes on six batches in a row")


def cosine(left: Array, right: Array) -> float:
    norms = np.linalg.norm(left) * np.linalg.norm(right)
    return float(np.vdot(left, right) / norms) if norms > 0 else 1.0


def test_forward_agrees_with_torch(agreeing: tuple[Graph, tuple[Layers, Side], Batch, Seen]) -> None:
    graph, state, batch, expected = agreeing
    got = watched(WatchedNative(2), graph, state, batch, DRAWS)
    assert got.result.samples == expected.result.samples
    assert got.result.accuracy == expected.result.accuracy
    assert got.result.loss == pytest.approx(expected.result.loss, abs=1e-4)
    for name, tensor in got.side.items():
        if "running" in name:
            np.testing.assert_allclose(tensor, expected.side[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_gradients_from_float_errors_agree_with_torch(
    agreeing: tuple[Graph, tuple[Layers, Side], Batch, Seen],
) -> None:
    """To within what bfloat16 keeps of an error, its 8 bits of mantissa."""
    graph, state, batch, expected = agreeing
    got = watched(WatchedNative(1, float_errors=True), graph, state, batch, DRAWS)
    assert got.layers.keys() == expected.layers.keys()
    assert got.sides.keys() == expected.sides.keys()
    for name, gradient in expected.layers.items():
        assert np.linalg.norm(got.layers[name] - gradient) < 0.015 * np.linalg.norm(gradient), name
    # Sums over all pixels nearly cancel in places, clips' above all.
    greatest = max(float(np.linalg.norm(gradient)) for gradient in expected.sides.values())
    for name, gradient in expected.sides.items():
        assert got.sides[name].shape == gradient.shape
        limit = 0.015 * np.linalg.norm(gradient) + 0.003 * greatest
        assert np.linalg.norm(got.sides[name] - gradient) < limit, name


def test_gradients_from_8_bit_errors_point_the_same_way(
    agreeing: tuple[Graph, tuple[Layers, Side], Batch, Seen],
) -> None:
    graph, state, batch, expected = agreeing
    got = watched(WatchedNative(1), graph, state, batch, DRAWS)
    for name, gradient in expected.layers.items():
        assert cosine(got.layers[name], gradient) > 0.98, name
        assert np.linalg.norm(got.layers[name]) == pytest.approx(np.linalg.norm(gradient), rel=0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "dropouts"])
def test_8_bit_errors_are_right_on_average(name: str) -> None:
    """The mean over seeds strays from the gradients of float errors by no more than its own noise.

    Another seed drops other things, which are other gradients.
    """
    graph, seeds = GRAPHS[name](), 24
    state, batch = random_state(graph, per_channel=True), random_batch(graph, 8)
    exact = watched(WatchedNative(1, float_errors=True), graph, state, batch, DRAWS)
    runs = [watched(WatchedNative(1), graph, state, batch, Draws(seed, 0, 0)) for seed in range(seeds)]
    for part in ("layers", "sides"):
        for tensor, gradient in getattr(exact, part).items():
            drawn = np.stack([getattr(run, part)[tensor] for run in runs]).reshape(seeds, -1)
            noise = np.sqrt(drawn.var(axis=0, ddof=1).sum() / seeds)
            # Beside it, bfloat16 rounds other numbers than without the noise.
            limit = 3 * noise + 0.01 * np.linalg.norm(gradient)
            assert np.linalg.norm(drawn.mean(axis=0) - gradient.reshape(-1)) <= limit, tensor


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("bits", [(1,), (4,), (8,)])
def test_accumulators_are_exact(monkeypatch: pytest.MonkeyPatch, name: str, bits: tuple[int, ...]) -> None:
    graph = GRAPHS[name]()
    layers, side = random_state(graph, bits=bits)
    own, sums = bound.conv_forward, dict[str, NDArray[np.int32]]()
    # A BatchNorm of codes is one of the products too.
    norms = {node.name for node in graph.nodes if isinstance(node.op, BatchNorm) and not graph.folds(node)}
    names = iter(node.name for node in graph.nodes if node in graph.layers or node.name in norms)

    def watching(conv: Any, codes: Any, weights: Any, threads: int, acc: Any, totals: Any) -> Call:
        name = next(names)

        def watch(_: None) -> None:
            sums[name] = acc.array.reshape(conv.images, -1).copy()
            if totals is not None:
                by_channel = acc.array.reshape(-1, conv.out_channels).astype(np.float64)
                found = totals.array[: 2 * conv.out_channels].reshape(2, -1)
                np.testing.assert_array_equal(found, [by_channel.sum(axis=0), (by_channel**2).sum(axis=0)])

        return Watched(own(conv, codes, weights, threads, acc, totals), after=watch)

    monkeypatch.setattr(bound, "conv_forward", watching)
    images, labels = random_batch(graph, 5)
    seen = watched(WatchedNative(2), graph, (layers, side), (images, labels), DRAWS)
    seen.codes["input"] = images.astype(np.int64).reshape(5, -1) - graph.input.zero_point
    for node in graph.layers:
        op, source = node.op, node.inputs[0]
        assert isinstance(op, Conv2d | Linear)
        read = seen.codes[source if node.dropout is None else f"{node.name} dropped"]
        codes = torch.from_numpy(read.reshape(5, *by_pixel(graph.shapes[source]))).double()
        weights = torch.from_numpy(layers[node.name].integer_weights()).double()
        if isinstance(op, Linear):
            expected = codes.reshape(5, -1) @ weights.t()
        else:
            expected = torch.nn.functional.conv2d(
                codes.permute(0, 3, 1, 2), weights, None, op.stride, op.padding, op.dilation, op.groups
            ).permute(0, 2, 3, 1)
        np.testing.assert_array_equal(sums[node.name], expected.reshape(5, -1).numpy(), err_msg=node.name)


def by_pixel(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[1:], shape[0])


@pytest.mark.parametrize("update", ["paper", "carried"])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_update_is_the_torch_engines_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, update: Any, momentum_bits: int, per_channel: bool
) -> None:
    """Every gradient that the native engine finds, given to the reference too, moves its weights alike."""
    graph = GRAPHS["pools"]()
    layers, side = random_state(graph, per_channel=per_channel)
    plan = TrainingPlan(
        update=update,
        momentum_bits=momentum_bits,
        learning_rate=0.3,
        code_learning_rate=0.2,
        weight_decay=0.01,
        lasso=5.0,
    )
    reference = {
        node.name: _TrainedLayer(index, node.name, layers[node.name], plan, DRAWS)
        for index, node in enumerate(graph.layers)
    }
    own, index = bound.update_codes, {i: node.name for i, node in enumerate(graph.layers)}

    def watching(update: Any, step: Any, threads: int, gradient: Any, codes: Any) -> Call:
        def watch() -> None:
            reference[index[update.layer]].apply(gradient.array.copy(), step.value)

        return Watched(own(update, step, threads, gradient, codes), before=watch)

    monkeypatch.setattr(bound, "update_codes", watching)
    engine = NativeEngine(1)
    engine.load(graph, layers, side, plan, DRAWS)
    strength = plan.learning_rate * plan.lasso / sum(graph.layer_sizes)
    for epoch in range(3):
        for layer in reference.values():
            layer.refresh_lasso(strength * layer.codes.size)
        engine.train_epoch([random_batch(graph, 6, seed) for seed in (2 * epoch, 2 * epoch + 1)])
        for name, moved in engine.layers().items():
            np.testing.assert_array_equal(moved.codes, reference[name].quantized().codes, err_msg=name)
        for name, fractions in engine.fractions().items():
            np.testing.assert_array_equal(fractions, reference[name].fractions, err_msg=name)
        assert len(engine.fractions()) == (len(layers) if update == "carried" else 0)
