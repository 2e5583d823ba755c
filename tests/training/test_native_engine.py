"""The native engine: what it keeps, what it repeats, what it refuses, and that it learns as torch's does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.workload import make_workload
from fedmpq import kernels
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels import bound, tensors
from fedmpq.kernels.call import Call
from fedmpq.kernels.program import Program
from fedmpq.model.graph import GraphError
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.state_checks import ProgramError
from fedmpq.training import product_units
from fedmpq.training.arena import Arena, Layout
from fedmpq.training.engine import Batch, EngineError, EpochResult, TrainingError, make_engine
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.product_units import Product
from fedmpq.training.sum_units import Sum
from tests.training.native_outcomes import (
    CARRIED,
    DRAWS,
    PAPER,
    Outcome,
    after,
    assert_same,
    loaded,
    outcome,
    same_codes,
    small_model,
    untouched,
)
from tests.training.small_graphs import GRAPHS, random_batch
from tests.training.watched_calls import Watched

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.slow
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


def test_a_rest_changes_nothing() -> None:
    """What lies in the block between two steps is nothing that the second needs."""
    model = small_model("bottlenecks")
    batches = [random_batch(model[0], count) for count in (8, 5, 8)]
    engines = loaded(model, PAPER), loaded(model, PAPER)
    for batch in batches:
        for engine in engines:
            engine.train_epoch([batch])
        engines[1].rest()
    codes = [{name: layer.codes for name, layer in engine.layers().items()} for engine in engines]
    assert all(np.array_equal(codes[0][name], codes[1][name]) for name in codes[0])
    sides = [engine.side() for engine in engines]
    assert all(np.array_equal(sides[0][name], sides[1][name]) for name in sides[0])


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
        elif isinstance(item, Program):  # beside its calls it has numbers and addresses of theirs
            waiting.extend(item.calls)
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
    # The rows and columns under the window of the one pool; whether each layer's accumulators fit 16 bits.
    others = [array for array in kept if array.dtype not in (np.uint8, np.int8, np.float32)]
    assert {(array.dtype.name, array.size) for array in others} == {("int32", 2), ("int32", 1)}
    assert sum(array.size == 2 for array in others) == 2
    assert sum(array.size == 1 for array in others) <= len(layers)


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


@pytest.mark.slow
@pytest.mark.parametrize("float_errors", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_kept_accumulators_change_nothing(
    isa: str, monkeypatch: pytest.MonkeyPatch, name: str, float_errors: bool
) -> None:
    """With room for those of all layers, whose weights are so few bits that 16 are enough."""
    monkeypatch.setattr(Layout, "_affordable", lambda layout, little: (layout._spare, 2**62))
    model = small_model(name, bits=(4, 2, 3, 1))
    outcomes = []
    for threads, least, kept in ((1, 10**9, False), (1, 1, True), (3, 1, True)):
        monkeypatch.setattr(product_units, "_WORTH_KEEPING", least)
        engine = loaded(model, threads=threads, float_errors=float_errors)
        outcomes.append(outcome(engine, model[0], (8, 3, 8)))
        assert set(kept_layers(engine, 8).values()) == {(kept, kept)}
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[0], outcomes[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_accumulators_computed_again_for_each_use_change_nothing(
    isa: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = small_model(name)
    outcomes = [outcome(loaded(model), model[0], (8, 3, 8))]
    monkeypatch.setattr(product_units, "_MANY_BYTES", 0)
    monkeypatch.setattr(product_units, "_FEW_PRODUCTS", 10**9)
    for threads in (1, 3):
        engine = loaded(model, threads=threads)
        outcomes.append(outcome(engine, model[0], (8, 3, 8)))
        assert_same(outcomes[0], outcomes[-1])
        for this in (unit.bound for unit in engine._steps[8]._units if isinstance(unit, Product)):
            odd = this.conv.out_width * this.conv.out_channels % 2 == 1
            grouped = this.conv.groups not in (1, this.conv.channels)
            assert this.stored == (odd or grouped or this.unit.norm is None)


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


@pytest.mark.slow
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
    assert kept == wide[-8:]
    assert blocks[1] <= blocks[0] * 7 // 6


def test_errors_are_copied_only_for_who_would_spoil_them() -> None:
    """Only a value added to itself needs two: a layer leaves the error of a shortcut as it is."""
    model = small_model("residuals")
    engine = loaded(model)
    outcome(engine, model[0], (8,))
    units = [unit for unit in engine._steps[8]._units if isinstance(unit, Sum)]
    sums = [unit for unit in units if unit.bound.right is not None]
    copied = {}
    for unit in sums:
        assert unit.backward_bound is not None
        copied[len(set(unit.bound.unit.sources)) == 1] = unit.backward_bound.copy is not None
    assert copied == {True: True, False: False}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran")

    for name in ("conv_forward", "requantize", "update_codes"):
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
