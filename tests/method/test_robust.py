"""Merging rules against slow references written from their definitions, and against hostile clients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan, Update, pack_layers
from fedmpq.method import robust
from fedmpq.method.aggregate import WeightedSum
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import Recipe, fedmpq
from fedmpq.method.robust import (
    PULL,
    Aggregation,
    Changes,
    limited_weights,
    middle_changes,
    suspects,
    votes,
    within_majority,
)
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.quantized import QuantizedLayer
from tests.server.small_model import GRAPH, first_state

SHAPES: dict[str, tuple[int, ...]] = {"first": (2, 3), "second": (1,), "third": (4, 1, 2)}
Change = dict[str, NDArray[np.float32]]


def drawn(seed: int, clients: int) -> list[Change]:
    random = np.random.default_rng(seed)
    common = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    return [
        {
            name: (common[name] + random.standard_normal(shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for _ in range(clients)
    ]


def changes_of(held: Sequence[Change]) -> Changes:
    return Changes(SHAPES, len(held), lambda names: ({name: each[name] for name in names} for each in held))


def merged_by(rule: Aggregation, weights: Sequence[float], held: Sequence[Change]) -> Change:
    changes = changes_of(held)
    found = middle_changes(rule, changes) or votes(rule, np.asarray(weights, float), changes).merged(changes)
    return found.mean()


def mean_of(weights: Sequence[float], held: Sequence[Change]) -> Change:
    total = WeightedSum()
    for weight, each in zip(weights, held, strict=True):
        total.add(weight, each)
    return total.mean()


def flat(change: Change) -> NDArray[np.float64]:
    return np.concatenate([tensor.ravel() for tensor in change.values()]).astype(np.float64)


def same(one: Change, other: Change) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in SHAPES)


@pytest.mark.parametrize(
    ("clients", "expected"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (7, 1), (8, 2), (100, 25)]
)
def test_a_quarter_may_be_hostile(clients: int, expected: int) -> None:
    assert suspects(clients) == expected


@given(st.integers(0, 2**32 - 1), st.integers(3, 9))
@settings(max_examples=40)
def test_trimmed_mean_and_median_are_taken_weight_by_weight(seed: int, clients: int) -> None:
    held = drawn(seed, clients)
    columns = np.stack([flat(each) for each in held]).T
    f = suspects(clients)
    trimmed = [sum(sorted(column)[f : clients - f]) / (clients - 2 * f) for column in columns]
    np.testing.assert_allclose(flat(merged_by("trimmed_mean", [1.0] * clients, held)), trimmed, rtol=1e-5)
    middle = np.median(columns, axis=1)
    np.testing.assert_allclose(flat(merged_by("median", [1.0] * clients, held)), middle, rtol=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(3, 9))
@settings(max_examples=40)
def test_krum_takes_the_update_nearest_to_its_neighbours(seed: int, clients: int) -> None:
    held = drawn(seed, clients)
    points = [flat(each) for each in held]
    near = max(1, clients - suspects(clients) - 2)
    scores = [sum(sorted(float(((a - b) ** 2).sum()) for b in points if b is not a)[:near]) for a in points]
    best = min(range(clients), key=lambda one: scores[one])
    assert same(merged_by("krum", [5.0] * clients, held), held[best])
    kept = sorted(sorted(range(clients), key=lambda one: scores[one])[: clients - suspects(clients)])
    expected = mean_of([1.0] * len(kept), [held[one] for one in kept])
    assert same(merged_by("multi_krum", [5.0] * clients, held), expected)


@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.1, 10), min_size=3, max_size=8))
@settings(max_examples=60)
def test_agreement_is_what_its_formula_says(seed: int, weights: list[float]) -> None:
    held = drawn(seed, len(weights))
    clients = range(len(weights))
    shortened: list[Change] = [{} for _ in held]
    scaled: list[Change] = [{} for _ in held]
    for name in SHAPES:
        lengths = [float(np.linalg.norm(each[name].astype(float))) for each in held]
        limit = PULL * float(np.median([w * length for w, length in zip(weights, lengths, strict=True)]))
        for n in clients:
            factor = min(1.0, limit / (weights[n] * lengths[n]))
            shortened[n][name] = (held[n][name] * factor).astype(np.float32)
            scaled[n][name] = shortened[n][name] / np.float32(np.median(lengths))
    points = [flat(each) / np.linalg.norm(flat(each)) for each in scaled]
    agreement = [float(np.median([points[n] @ points[k] for k in clients if k != n])) for n in clients]
    usual = float(np.median(agreement))
    if usual > 0:
        trust = [min(1.0, max(0.0, a / (robust.DOUBT * usual))) for a in agreement]
    else:
        out = sorted(clients, key=lambda n: agreement[n])[: suspects(len(weights))]
        trust = [0.0 if n in out else 1.0 for n in clients]
    expected = mean_of([w * t for w, t in zip(weights, trust, strict=True)], shortened)
    found = flat(merged_by("agreement", weights, held))
    np.testing.assert_allclose(found, flat(expected), rtol=1e-3, atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
@settings(max_examples=30)
def test_clients_that_agree_are_averaged_to_the_bit(seed: int, clients: int) -> None:
    first = drawn(seed, 1)[0]
    held = [{name: tensor * np.float32(1 + n / 50) for name, tensor in first.items()} for n in range(clients)]
    weights = [1 + n / 50 for n in range(clients)]
    assert same(merged_by("agreement", weights, held), mean_of(weights, held))


@pytest.mark.parametrize("rule", ["mean", "agreement", "trimmed_mean", "median", "krum", "multi_krum"])
@pytest.mark.parametrize("clients", [1, 2])
def test_without_a_majority_every_rule_is_a_mean(rule: Aggregation, clients: int) -> None:
    held, weights = drawn(1, clients), [1.0, 3.0][:clients]
    assert same(merged_by(rule, weights, held), mean_of(weights, held))


@pytest.mark.parametrize("rule", ["agreement", "trimmed_mean", "median", "krum", "multi_krum"])
@pytest.mark.parametrize("scale", [-1.0, -1e6, 1e6])
def test_one_in_four_does_not_turn_the_others_round(rule: Aggregation, scale: float) -> None:
    for seed in range(20):
        honest = drawn(seed, 3)
        hostile = {name: tensor * np.float32(scale) for name, tensor in drawn(seed, 1)[0].items()}
        found, way = flat(merged_by(rule, [1.0] * 4, [*honest, hostile])), flat(mean_of([1.0] * 3, honest))
        largest = max(np.linalg.norm(flat(each)) for each in honest)
        assert found @ way > 0
        assert np.linalg.norm(found) <= 2 * largest


def test_layers_that_nobody_or_few_have_moved() -> None:
    held = drawn(0, 4)
    for each in held:
        each["second"] = np.zeros(1, np.float32)
    for each in held[1:]:
        each["third"] = np.zeros((4, 1, 2), np.float32)
    found = merged_by("agreement", [1.0] * 4, held)
    assert not found["second"].any()
    assert np.isfinite(flat(found)).all()
    assert found["third"].any()


def test_groups_of_layers_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    held, weights = drawn(3, 5), [1.0, 2.0, 3.0, 4.0, 5.0]
    rules: list[Aggregation] = ["agreement", "trimmed_mean", "median", "krum", "multi_krum"]
    whole = [merged_by(rule, weights, held) for rule in rules]
    monkeypatch.setattr(robust, "GROUP_BYTES", 1)
    assert len(list(changes_of(held)._groups())) == len(SHAPES)
    assert all(same(one, merged_by(rule, weights, held)) for one, rule in zip(whole, rules, strict=True))


def test_a_claim_counts_up_to_the_limit() -> None:
    fleet = [370.0, 400.0, 380.0, 10_000_000.0]
    assert limited_weights(fleet, fleet, 3.0).tolist() == [370, 400, 380, 3 * 390]
    assert limited_weights(fleet, fleet, None).tolist() == fleet


def test_side_tensors_stay_within_what_another_client_says() -> None:
    honest = [{"gamma": np.array([1.0 + n, -n], np.float32)} for n in range(3)]
    for lie in (1e30, -1e30):
        kept = within_majority([*honest, {"gamma": np.full(2, lie, np.float32)}])
        for each in kept:
            assert (each["gamma"] >= [1, -2]).all()
            assert (each["gamma"] <= [3, 0]).all()
    assert within_majority(honest[:2])[1]["gamma"].tolist() == [2, -1]


# In the method

BEST = fedmpq("best", TrainingPlan())
RULES: list[Aggregation] = ["agreement", "trimmed_mean", "median", "krum", "multi_krum"]


def moved(method: QuantizedMethod, model: GlobalModel, client: ClientRecord, by: int) -> Update:
    """Every weight of the client's model has moved by so many 256ths of a step, give or take a half."""
    sent = method.assign(model, client)
    layers = {}
    for name, layer in sent.layers.items():
        shape = GRAPH.weight_shape(name)
        codes = np.full(shape, 0 if by < 0 else 2**layer.bits - 1, np.uint8)
        step = np.full(layer.step.shape, max(1, abs(by) // 2**layer.bits), np.float32)
        layers[name] = QuantizedLayer(codes, layer.bits, step)
    return Update(1, client.client, client.samples, pack_layers(layers), sent.side, loss=1.0, accuracy=0.5)


def a_round(recipe: Recipe, by: Sequence[int], samples: Sequence[int]) -> tuple[GlobalModel, GlobalModel]:
    clients = [ClientRecord(n, 4.0, count) for n, count in enumerate(samples)]
    method = QuantizedMethod(GRAPH, recipe, 0)
    model = method.start(*first_state(0), clients)
    return model, method.merge(
        model, [moved(method, model, one, way) for one, way in zip(clients, by, strict=True)]
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("merge", ["deltas", "models"])
def test_a_hostile_board_does_not_decide_the_round(rule: Aggregation, merge: str) -> None:
    recipe = replace(BEST, aggregation=rule)
    if merge == "models":
        recipe = replace(fedmpq("paper", TrainingPlan()), aggregation=rule, share_limit=3.0)
    before, after = a_round(recipe, [64, 64, 64, -60_000], [400, 380, 390, 10_000_000])
    _, honest = a_round(replace(recipe, aggregation="mean"), [64, 64, 64], [400, 380, 390])
    for name in before.weights:
        wanted, found = (
            honest.weights[name] - before.weights[name],
            after.weights[name] - before.weights[name],
        )
        assert float((wanted * found).sum()) > 0, name


def test_a_claim_made_after_the_client_was_chosen_does_not_count() -> None:
    clients = [ClientRecord(n, 4.0, 400) for n in range(2)]
    method = QuantizedMethod(GRAPH, BEST, 0)
    model = method.start(*first_state(0), clients)
    updates = [moved(method, model, one, way) for one, way in zip(clients, (64, -64), strict=True)]
    raised = [updates[0], replace(updates[1], samples=10_000_000)]
    one, other = method.merge(model, updates), method.merge(model, raised)
    for name in one.weights:
        assert one.weights[name].tobytes() == other.weights[name].tobytes()


def test_the_order_of_clients_is_all_that_a_merge_depends_on() -> None:
    ways = list(itertools.islice(itertools.cycle([64, 48, -32]), 7))
    for rule in RULES:
        one = a_round(replace(BEST, aggregation=rule), ways, [100] * 7)[1]
        other = a_round(replace(BEST, aggregation=rule), ways, [100] * 7)[1]
        assert all(one.weights[name].tobytes() == other.weights[name].tobytes() for name in one.weights)
