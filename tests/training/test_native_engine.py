"""The native engine: what it keeps, what it repeats, what it refuses, and that it learns as torch's does."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.workload import make_workload
from fedmpq import kernels
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels import bound, tensors
from fedmpq.kernels.call import Call
from fedmpq.model import integer_forward, zoo
from fedmpq.model.activations import MIN_CLIP
from fedmpq.model.graph import Graph, GraphError
from fedmpq.model.integer_program import ProgramError, compile_program
from fedmpq.model.module_state import initial_state
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.trace import trace
from fedmpq.training import product_units
from fedmpq.training.arena import Arena, Layout
from fedmpq.training.engine import Batch, Engine, EngineError, EpochResult, TrainingError, make_engine
from fedmpq.training.local_round import batches
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.product_units import Product
from fedmpq.training.sum_units import Sum
from fedmpq.training.torch_engine import TorchEngine
from tests.training.small_graphs import GRAPHS, random_batch, random_state
from tests.training.watched_calls import Watched

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.fixture(params=kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.isa()
    kernels.force_isa(request.param)
    yield request.param
    kernels.force_isa(before)


@cache
def scalar_outcome(name: str, plan: TrainingPlan) -> Outcome:
    before = kernels.isa()
    kernels.force_isa("scalar")
    try:
        model = small_model(name, per_channel=plan is PAPER)
        return outcome(loaded(model, plan), model[0], (1, 2, 7, 32))
    finally:
        kernels.force_isa(before)


@pytest.mark.parametrize("plan", [PAPER, CARRIED], ids=["paper", "carried"])
@pytest.mark.parametrize("name", GRAPHS)
def test_threads_and_instruction_sets_change_nothing(isa: str, name: str, plan: TrainingPlan) -> None:
    model = small_model(name, per_channel=plan is PAPER)
    for threads in (1, 2, 3):
        got = outcome(loaded(model, plan, threads=threads), model[0], (1, 2, 7, 32))
        assert_same(got, scalar_outcome(name, plan))


@pytest.mark.parametrize("draws", [Draws(9, 2, 3), Draws(1, 9, 3), Draws(1, 2, 9)])
def test_another_seed_client_or_round_draws_otherwise(draws: Draws) -> None:
    model = small_model("residuals")
    first = outcome(loaded(model), model[0], (8,))
    assert_same(first, outcome(loaded(model), model[0], (8,)))
    other = outcome(loaded(model, draws=draws), model[0], (8,))
    assert any((first[3][name] != other[3][name]).any() for name in first[3])
    # The forward pass of the first batch draws nothing.
    assert first[0] == other[0]


def test_errors_are_rounded_with_draws_of_their_own() -> None:
    """Two seeds under which all codes stay put still give two different gradients of a side tensor."""
    model = small_model("residuals")
    plan = replace(CARRIED, code_learning_rate=1e-9, weight_decay=0.0, lasso=0.0)
    sides = []
    for seed in (1, 2):
        _, layers, side, _ = outcome(loaded(model, plan, Draws(seed, 0, 0)), model[0], (8,))
        assert same_codes(layers, model[1])
        sides.append(side)
    assert not np.array_equal(sides[0]["batchnorm1.weight"], sides[1]["batchnorm1.weight"])


def test_loading_starts_afresh() -> None:
    """Neither momentum nor the count of steps outlives a round, nor does another batch size."""
    model = small_model("bottlenecks")
    engine = loaded(model, PAPER)
    first = outcome(engine, model[0], (8, 8))
    engine.train_epoch([random_batch(model[0], 3)])
    engine.load(*model, PAPER, DRAWS)
    assert_same(outcome(engine, model[0], (8, 8)), first)


def test_what_was_handed_over_does_not_change() -> None:
    graph, layers, side = small_model("pools")
    for array in (*(a for layer in layers.values() for a in (layer.codes, layer.step)), *side.values()):
        array.setflags(write=False)
    engine = loaded((graph, layers, side))
    before = outcome(engine, graph, (8,))
    kept = {name: layer.codes.copy() for name, layer in before[1].items()}
    outcome(engine, graph, (8,))
    assert all(np.array_equal(kept[name], layer.codes) for name, layer in before[1].items())


def test_an_empty_epoch_changes_nothing() -> None:
    model = small_model("images")
    engine = loaded(model)
    assert_same(after(engine, engine.train_epoch([])), untouched(model))


def test_batches_that_are_not_contiguous_will_do() -> None:
    model = small_model("images")
    images, labels = random_batch(model[0], 12)
    whole, apart = loaded(model), loaded(model)
    expected = whole.train_epoch([(images[::2].copy(), labels[::2].copy())])
    turned = np.asfortranarray(images)
    assert apart.train_epoch([(turned[::2], labels[::2])]) == expected
    assert same_codes(whole.layers(), apart.layers())


def test_means_are_over_samples_not_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 16 and 2 with losses of 16 and 2 and one right answer each."""

    own = bound.softmax_loss

    def judged(acc: Any, samples: int, classes: int, *rest: Any) -> Call:
        *_, gradient, loss = rest

        def falsify(_: int) -> int:
            gradient.array[:], loss.array[:] = 0.0, samples
            return 1

        return Watched(own(acc, samples, classes, *rest), after=falsify)

    monkeypatch.setattr(bound, "softmax_loss", judged)
    model = small_model("images")
    result, *_ = outcome(loaded(model), model[0], (16, 2))
    assert result.samples == 18
    assert result.loss == pytest.approx((16 * 16 + 2 * 2) / 18)
    assert result.accuracy == pytest.approx(2 / 18)


def arrays_of(root: object) -> Iterator[NDArray[Any]]:
    """Every array that attributes and containers lead to, but for the memory that steps reuse."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, Arena | memoryview):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            if item.base is None:
                yield item
            waiting.append(item.base)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
        elif isinstance(item, Call):
            waiting.extend(item._kept)
        elif hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())


@pytest.mark.parametrize("plan", [PAPER, CARRIED], ids=["paper", "carried"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
def test_codes_are_the_only_weights_kept(plan: TrainingPlan, per_channel: bool, momentum_bits: int) -> None:
    graph, layers, side = small_model("residuals", per_channel=per_channel)
    engine = loaded((graph, layers, side), replace(plan, momentum_bits=momentum_bits))
    outcome(engine, graph, (8, 8))
    kept, weights = list(arrays_of(engine)), sum(graph.layer_sizes)
    assert sum(array.size for array in kept if array.dtype == np.uint8) == weights
    floats = sum(array.size for array in kept if array.dtype.kind == "f")
    # Per channel: step, scale, rate and a zero. Per layer: a Lasso table. Per side tensor: itself, its
    # gradient, its momentum and a limit or weight.
    channels = sum(graph.weight_shape(node.name)[0] for node in graph.layers)
    tables = sum(2 ** (layer.bits - 1) for layer in layers.values())
    blocks = sum(-(-size // tensors.MOMENTUM_BLOCK) for size in graph.layer_sizes)
    small = 4 * sum(tensor.size for tensor in side.values()) + 4 * channels + tables + blocks
    assert floats <= small + (weights if momentum_bits == 32 else 0)
    assert small < weights
    signed = sum(array.size for array in kept if array.dtype == np.int8)
    carried = weights if plan.update == "carried" else 0
    assert signed == carried + (blocks * tensors.MOMENTUM_BLOCK if momentum_bits == 8 else 0)
    assert not [array.dtype for array in kept if array.dtype not in (np.uint8, np.int8, np.float32)]


def test_a_batch_does_not_outlive_its_step() -> None:
    model = small_model("bottlenecks")
    engine = loaded(model)
    batch = random_batch(model[0], 8)
    kept = [weakref.ref(array) for array in batch]
    engine.train_epoch(iter([batch]))
    del batch
    assert [array() for array in kept] == [None, None]


@pytest.mark.parametrize("name", GRAPHS)
def test_batch_sizes_may_change_at_will(name: str) -> None:
    """A step made anew in memory of its own does what one does that has shared memory with others."""
    model, sizes = small_model(name), (3, 8, 1, 3, 12, 8, 2, 12, 3)
    shared, apart = loaded(model), loaded(model)
    expected = []
    for seed, size in enumerate(sizes):
        apart._steps.clear()
        apart._arena = Arena()
        expected.append(apart.train_epoch([random_batch(model[0], size, seed)]))
    results = [shared.train_epoch([random_batch(model[0], size, seed)]) for seed, size in enumerate(sizes)]
    assert results == expected
    assert_same(after(shared, results[0]), after(apart, results[0]))


def kept_layers(engine: NativeEngine, images: int) -> dict[str, tuple[bool, bool]]:
    """For every layer but the last, whether there is room for its accumulators, and whether they are kept."""
    units = [unit for unit in engine._steps[images]._units if isinstance(unit, Product)]
    return {unit.bound.unit.node.name: (unit.has_room, unit.is_kept) for unit in units}


@pytest.mark.parametrize("float_errors", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_kept_accumulators_change_nothing(
    isa: str, monkeypatch: pytest.MonkeyPatch, name: str, float_errors: bool
) -> None:
    """With room for those of all layers, whose weights are so few bits that 16 are enough."""
    monkeypatch.setattr(Layout, "_affordable", lambda layout: (layout._spare, 2**62))
    model = small_model(name, bits=(4, 2, 3, 1))
    outcomes = []
    for threads, least, kept in ((1, 10**9, False), (1, 1, True), (3, 1, True)):
        monkeypatch.setattr(product_units, "_WORTH_KEEPING", least)
        engine = loaded(model, threads=threads, float_errors=float_errors)
        outcomes.append(outcome(engine, model[0], (8, 3, 8)))
        assert set(kept_layers(engine, 8).values()) == {(kept, kept)}
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[0], outcomes[2])


def test_accumulators_too_large_for_16_bits_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights the greatest there is: 72 products of 127 and a code."""
    graph, layers, side = small_model("residuals")
    layers = {
        name: replace(layer, bits=8, codes=np.full_like(layer.codes, 255)) for name, layer in layers.items()
    }
    outcomes = []
    for least in (10**9, 64):
        monkeypatch.setattr(product_units, "_WORTH_KEEPING", least)
        engine = loaded((graph, layers, side))
        outcomes.append(outcome(engine, graph, (8,)))
    assert set(kept_layers(engine, 8).values()) == {(False, False), (True, False)}
    assert_same(*outcomes)


def test_resnet20_keeps_accumulators_of_its_last_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_workload("resnet20", 64)
    outcomes, blocks = [], []
    for least in (10**9, product_units._WORTH_KEEPING):
        monkeypatch.setattr(product_units, "_WORTH_KEEPING", least)
        engine = loaded((work.graph, work.layers, work.side))
        outcomes.append(after(engine, engine.train_epoch(work.batches[:1])))
        blocks.append(engine._arena.block.nbytes)
    assert_same(*outcomes)
    kept = [name for name, (_, is_kept) in kept_layers(engine, 64).items() if is_kept]
    wide = [node.name for node in work.graph.layers if work.graph.weight_shape(node.name)[2:] == (3, 3)]
    assert kept == wide[-7:]
    assert blocks[1] <= blocks[0] * 7 // 6


def test_errors_are_copied_only_for_who_would_spoil_them() -> None:
    """Only a value added to itself needs two: a layer leaves the error of a shortcut as it is."""
    model = small_model("residuals")
    engine = loaded(model)
    outcome(engine, model[0], (8,))
    units = [unit for unit in engine._steps[8]._units if isinstance(unit, Sum)]
    sums = [unit for unit in units if unit.bound.right is not None]
    copied = {len(set(unit.bound.unit.sources)) == 1: unit.backward_bound.copy is not None for unit in sums}
    assert copied == {True: True, False: False}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran")

    for name in ("conv_forward", "max_pool", "requantize", "update_codes"):
        monkeypatch.setattr(bound, name, refuse)


def spoiled(batch: Batch, **changes: Callable[[NDArray[Any]], NDArray[Any]]) -> Batch:
    images, labels = batch
    return changes.get("images", lambda a: a)(images), changes.get("labels", lambda a: a)(labels)


def with_label(label: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda labels: np.append(labels[:-1], np.int64(label))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"labels": with_label(5)}, r"labels run from 0 to 5, the model's classes end at 4"),
        ({"labels": with_label(-1)}, r"labels run from -1 to 4"),
        ({"labels": lambda a: a[:-1]}, r"labels of 40 images are int64 of shape \(39,\)"),
        ({"labels": lambda a: a.astype(np.int32)}, r"are int32 of shape \(40,\); they must be int64"),
        ({"labels": lambda a: a[:, None]}, r"of shape \(40, 1\)"),
        (
            {"images": lambda a: a.astype(np.float32)},
            r"float32 of shape \(40, 8, 6, 2\), the model takes uint8",
        ),
        (
            {"images": lambda a: a[:, :7]},
            r"shape \(40, 7, 6, 2\), the model takes uint8 of \(images, 8, 6, 2\)",
        ),
        ({"images": lambda a: a.transpose(0, 3, 1, 2)}, r"shape \(40, 2, 8, 6\)"),
        ({"images": lambda a: a[0]}, r"shape \(8, 6, 2\)"),
        ({"images": lambda a: a[..., :1]}, r"shape \(40, 8, 6, 1\)"),
        ({"images": lambda a: a[:0], "labels": lambda a: a[:0]}, "at least one image"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_any_kernel_runs(
    changes: dict[str, Callable[[NDArray[Any]], NDArray[Any]]], complaint: str
) -> None:
    model = small_model("images")
    engine = loaded(model)
    with pytest.raises(TrainingError, match=complaint):
        engine.train_epoch([spoiled(random_batch(model[0], 40), **changes)])
    assert_same(after(engine, EpochResult(0, 0.0, 0.0)), untouched(model))


def test_a_state_that_does_not_fit_its_graph_is_refused() -> None:
    graph, layers, side = small_model("images")
    name, layer = next(iter(layers.items()))
    cases: list[tuple[Layers, Side, str]] = [
        ({key: value for key, value in layers.items() if key != name}, side, "is missing"),
        ({**layers, name: replace(layer, bits=1)}, side, "at 1 bits they lie in 0..1"),
        ({**layers, name: replace(layer, codes=layer.codes[:1])}, side, "of shape"),
        (layers, {key: value * np.float32(np.nan) for key, value in side.items()}, "NaN or infinity"),
        (layers, {key: value.astype(np.float64) for key, value in side.items()}, "of float64"),
    ]
    for bad_layers, bad_side, complaint in cases:
        with pytest.raises(ProgramError, match=complaint):
            loaded((graph, bad_layers, bad_side))


def test_a_graph_it_cannot_express_is_refused_when_loaded() -> None:
    graph, layers, side = small_model("images")
    nodes = tuple(node for node in graph.nodes if "quantized" not in node.name)
    inputs = {node.name: tuple(each.removesuffix(".quantized") for each in node.inputs) for node in nodes}
    bare = replace(graph, nodes=tuple(replace(node, inputs=inputs[node.name]) for node in nodes))
    real = {name: tensor for name, tensor in side.items() if "quantized" not in name}
    with pytest.raises(GraphError, match=r"'add\d+' \(Add\) reads 'relu\d+', which holds real"):
        loaded((bare, layers, real))


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread_is_refused(threads: int) -> None:
    with pytest.raises(EngineError, match=f"threads = {threads}: the native engine needs at least one"):
        NativeEngine(threads)


def test_engines_have_their_names() -> None:
    for name, float_errors in (("native", False), ("native-float-errors", True)):
        engine = make_engine(name, threads=2)
        assert isinstance(engine, NativeEngine)
        assert engine.threads == 2
        assert engine._float_errors == float_errors


# Numbers that are none -------------------------------------------------------------------------------------


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


# Whole models ----------------------------------------------------------------------------------------------


def traced(spec: str, seed: int) -> Model:
    """A network of the zoo for 32x32 images, 4 bits; its clips are not the round ones on which sums tie."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = zoo.build(spec, classes=10, channels=3)
    graph = trace(
        module,
        torch.zeros(1, 3, 32, 32),
        name=spec,
        activation_bits=4,
        input_scale=0.015625,
        input_zero_point=120,
    )
    weights, side = initial_state(module, graph)
    random = np.random.default_rng(seed)
    for name, tensor in side.items():
        if name.endswith(".clip"):
            side[name] = np.asarray(tensor * random.uniform(0.8, 1.0), dtype=np.float32)
    layers = {
        name: QuantizedLayer.from_weights(weight, 4, "least_error", True) for name, weight in weights.items()
    }
    return graph, layers, side


@pytest.mark.parametrize(("spec", "count"), [("mobilenet_v2", 4), ("resnet18", 2)])
def test_large_models_train_a_step_like_torch(spec: str, count: int) -> None:
    model = traced(spec, 0)
    plan = replace(CARRIED, learning_rate=0.01)
    differences = []
    for seed in range(4):
        batch = random_batch(model[0], count, seed)
        native, reference = loaded(model, plan), TorchEngine()
        result = native.train_epoch([batch])
        assert all(np.isfinite(tensor).all() for tensor in native.side().values())
        assert not same_codes(native.layers(), model[1])
        reference.load(*model, plan, DRAWS)
        differences.append(abs(result.loss - reference.train_epoch([batch]).loss))
        # A code that falls the other way, for the last bit of a float, shows in the loss.
        if differences[-1] < 1e-4:
            return
    pytest.fail(f"the losses differ by {differences}")


DIGITS = {
    "paper": ("max", TrainingPlan(update="paper", learning_rate=0.5, momentum_bits=8)),
    "carried": ("least_error", TrainingPlan(update="carried", learning_rate=0.2, code_learning_rate=0.1)),
}


@pytest.fixture(scope="module")
def digits_accuracy(digits: Any) -> Callable[[str, str], float]:
    """Mean accuracy of three seeds on the test images, after three epochs and one at a tenth of the rates."""

    @cache
    def accuracy(engine_name: str, rule: str) -> float:
        return float(np.mean([trained(engine_name, rule, seed) for seed in range(3)]))

    def trained(engine_name: str, rule: str, seed: int) -> float:
        steps, fast = DIGITS[rule]
        slow = replace(
            fast, learning_rate=fast.learning_rate / 10, code_learning_rate=fast.code_learning_rate / 10
        )
        layers, side = digits.layers(4, steps), digits.side
        for number, (plan, epochs) in enumerate(((fast, 3), (slow, 1))):
            plan, draws = replace(plan, batch_size=48), Draws(seed, 0, number)
            engine = make_engine(engine_name, threads=1)
            engine.load(digits.graph, layers, side, plan, draws)
            for epoch in range(epochs):
                engine.train_epoch(batches(digits.train, plan, draws, epoch, digits.graph.input.zero_point))
            layers, side = engine.layers(), engine.side()
        program = compile_program(digits.graph, layers, side)
        guesses = integer_forward.logits(program, digits.test.images, products=native_products).argmax(axis=1)
        return float(np.mean(guesses == digits.test.labels))

    return accuracy


@pytest.mark.parametrize("rule", DIGITS)
def test_digits_are_learnt_as_well_as_by_torch(
    digits_accuracy: Callable[[str, str], float], rule: str
) -> None:
    native = digits_accuracy("native", rule)
    assert native > 0.96
    assert native > digits_accuracy("torch", rule) - 0.015


@pytest.mark.parametrize("rule", DIGITS)
def test_8_bit_errors_cost_no_accuracy(digits_accuracy: Callable[[str, str], float], rule: str) -> None:
    assert digits_accuracy("native", rule) > digits_accuracy("native-float-errors", rule) - 0.01


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory needs Linux")
@pytest.mark.parametrize("update", ["paper", "carried"])
def test_a_step_takes_a_tenth_of_torchs_memory(tmp_path: Path, update: str) -> None:
    """ResNet-20 at batch 64 in a process without torch; torch fp32 grows by 171 MB."""
    path = tmp_path / "resnet20.npz"
    make_workload("resnet20", 64).save(path)
    command = [sys.executable, "-m", "bench.memory", "native", str(path), "--update", update]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["growth_mb"] <= 17.0
