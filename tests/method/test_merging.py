"""Merging as updates arrive, in parts, and with as few readings of each as the rule needs."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.exchange.messages import TrainingPlan, Update, pack_layers, unpack_layers
from fedmpq.method import merging, running_merge
from fedmpq.method.aggregate import MergeError, WeightedSum
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import Recipe, fedmpq
from fedmpq.method.robust import Aggregation
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.pruning import prune_msb
from fedmpq.model.quantized import QuantizedLayer
from tests.method.test_quantized_method import assert_same
from tests.server.small_model import GRAPH, first_state

PAPER, BEST = fedmpq("paper", TrainingPlan()), fedmpq("best", TrainingPlan())
MEAN = replace(BEST, aggregation="mean")
DELTAS = replace(PAPER, merge="deltas")
RULES: list[Aggregation] = ["mean", "agreement", "trimmed_mean", "median", "krum", "multi_krum"]


def a_round(recipe: Recipe, clients: int, seed: int = 0) -> tuple[QuantizedMethod, GlobalModel, list[Update]]:
    """A method, its first model, and what clients of unequal budgets and data have made of it."""
    random = np.random.default_rng(seed)
    records = [
        ClientRecord(n, (2.0, 4.0, 5.5, 8.0)[n % 4], int(random.integers(20, 60))) for n in range(clients)
    ]
    method = QuantizedMethod(GRAPH, recipe, 0)
    model = method.start(*first_state(seed), records)
    updates = []
    for record in records:
        sent = method.assign(model, record)
        layers = {
            name: returned(recipe, layer, random) for name, layer in unpack_layers(GRAPH, sent.layers).items()
        }
        side = {n: t + np.float32(random.normal(0, 0.01)) for n, t in sent.side.items()}
        packed = pack_layers(layers)
        updates.append(Update(1, record.client, record.samples, packed, side, loss=1.0, accuracy=0.5))
    return method, model, updates


def returned(recipe: Recipe, layer: QuantizedLayer, random: np.random.Generator) -> QuantizedLayer:
    """Codes that mostly go one way; where models come back, maybe with planes pruned."""
    if recipe.plan.update == "carried":
        codes = random.integers(0, 2**layer.bits, layer.codes.shape).astype(np.uint8) | (
            1 << (layer.bits - 1)
        )
        return QuantizedLayer(
            codes.astype(np.uint8), layer.bits, np.full_like(layer.step, random.integers(1, 90))
        )
    top = 2**layer.bits - 1
    codes = np.clip(layer.codes.astype(np.int16) + random.integers(-1, 3, layer.codes.shape), 1, top)
    return QuantizedLayer(*prune_msb(codes.astype(np.uint8), layer.bits, 0.3), layer.step)


@settings(max_examples=25)
@given(st.integers(0, 1000), st.sampled_from([MEAN, DELTAS, replace(MEAN, per_channel=True)]), st.data())
def test_updates_may_arrive_in_any_order_and_in_any_parts(
    seed: int, recipe: Recipe, data: st.DataObject
) -> None:
    method, model, updates = a_round(recipe, 9, seed)
    expected = method.merge(model, updates)
    parts = [method.begin(model) for _ in range(data.draw(st.integers(1, 4)))]
    for update in data.draw(st.permutations(updates)):
        data.draw(st.sampled_from(parts)).add(update)
    while len(parts) > 1:
        one, other = parts.pop(data.draw(st.integers(0, len(parts) - 1))), data.draw(st.sampled_from(parts))
        if data.draw(st.booleans()):
            other.merge(one)
        else:
            other.take(pickle.loads(pickle.dumps(one.partial())))
    assert_same(parts[0].finish(), expected)
    for used in (
        lambda: parts[0].add(updates[0]),
        parts[0].finish,
        lambda: method.begin(model).merge(parts[0]),
        parts[0].partial,
    ):
        with pytest.raises(MergeError, match="this merge is finished"):
            used()
    # And it has moved: a merge that does nothing would be in order too.
    assert any(expected.weights[name].tobytes() != w.tobytes() for name, w in model.weights.items())


def test_whole_models_are_averaged_as_floats_in_the_order_of_clients() -> None:
    method, model, updates = a_round(PAPER, 5)
    total = WeightedSum()
    for update, record in zip(updates, model.clients, strict=True):
        layers = unpack_layers(GRAPH, update.layers)
        total.add(record.budget * record.samples, {name: layer.weights() for name, layer in layers.items()})
    running = method.begin(model)
    for update in updates:
        running.add(update)
    for found in (method.merge(model, updates), running.finish()):
        for name, tensor in total.mean().items():
            assert found.weights[name].tobytes() == tensor.tobytes()
    other = method.begin(model)
    other.add(updates[3])
    with pytest.raises(MergeError, match="merge in order"):
        other.add(updates[1])
    with pytest.raises(MergeError, match="in the order of clients"):
        method.begin(model).merge(other)
    with pytest.raises(MergeError, match="in the order of clients"):
        other.partial()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
def test_rules_that_compare_updates_cannot_begin_without_them(rule: Aggregation) -> None:
    method, model, _ = a_round(replace(BEST, aggregation=rule), 3)
    with pytest.raises(MergeError, match=f"{rule}.* compares the updates of a round"):
        method.begin(model)


def test_an_update_that_does_not_belong_changes_nothing() -> None:
    method, model, updates = a_round(MEAN, 4)
    running = method.begin(model)
    for update in updates[:3]:
        running.add(update)
    layers = dict(updates[3].layers)
    last = next(reversed(layers))
    layers[last] = replace(layers[last], step=layers[last].step + np.float32(0.5))
    for bad, message in (
        (replace(updates[3], layers=layers), f"change of layer {last!r} has a step that is no whole number"),
        (updates[1], "client 1 sent two updates"),
        (replace(updates[3], round=3), "is of round 3, not 1"),
        (replace(updates[3], client=9), "does not have that client"),
    ):
        with pytest.raises(MergeError, match=message):
            running.add(bad)
    other = method.begin(model)
    other.add(updates[2])
    with pytest.raises(MergeError, match="client 2 sent two updates"):
        running.merge(other)
    with pytest.raises(MergeError, match="client 2 sent two updates"):
        running.take(other.partial())
    assert_same(running.finish(), method.merge(model, updates[:3]))


@dataclass
class Counted:
    """Updates that know how often each was read."""

    updates: list[Update]
    read: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Update]:
        for update in self.updates:
            self.read.append(update.client)
            yield update


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("recipe", [BEST, DELTAS, PAPER])
def test_each_update_is_read_once_where_they_can_be_held(
    recipe: Recipe, rule: Aggregation, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, model, updates = a_round(replace(recipe, aggregation=rule), 5)
    counted = Counted(updates)
    expected = method.merge(model, counted)
    assert counted.read == [0, 1, 2, 3, 4]
    # A mean needs no more whatever there is room for; other rules read again, some layers at a time.
    largest = max(sum(update.layers[name].nbytes for update in updates) for name in updates[0].layers)
    for room in (1, largest):
        for module in (merging, running_merge):
            monkeypatch.setattr(module, "HELD_BYTES", room)
        again = Counted(updates)
        assert_same(method.merge(model, again), expected)
        assert len(again.read) == 5 if rule == "mean" else len(again.read) > 5
    assert_same(method.merge(model, iter(updates)), expected)


@pytest.mark.parametrize("recipe", [BEST, DELTAS])
def test_where_all_agree_it_is_the_mean_to_the_bit(recipe: Recipe) -> None:
    method, model, updates = a_round(replace(recipe, aggregation="agreement"), 2)
    mean = QuantizedMethod(GRAPH, replace(recipe, aggregation="mean"), 0)
    assert_same(method.merge(model, updates), mean.merge(model, updates))
    # Three of one mind, and equal in their data.
    equal = [replace(record, budget=4.0, samples=30) for record in a_round(recipe, 3)[1].clients]
    method, mean = (
        QuantizedMethod(GRAPH, replace(recipe, aggregation=rule), 0) for rule in ("agreement", "mean")
    )
    model = method.start(*first_state(0), equal)
    sent = unpack_layers(GRAPH, method.assign(model, equal[0]).layers)
    random = np.random.default_rng(0)
    layers = pack_layers({name: returned(recipe, layer, random) for name, layer in sent.items()})
    alike = [
        replace(update, client=n, samples=30, layers=layers)
        for n, update in enumerate(itertools.islice(itertools.repeat(updates[0]), 3))
    ]
    assert_same(method.merge(model, alike), mean.merge(model, alike))


def test_a_client_without_a_majority_weighs_by_its_data() -> None:
    """Weights as whole numbers: two clients with 1 and 3 samples move a weight by a quarter and three."""
    records = [ClientRecord(0, 4.0, 1), ClientRecord(1, 4.0, 3)]
    method = QuantizedMethod(GRAPH, replace(MEAN, share_limit=None), 0)
    model = method.start(*first_state(0), records)
    updates = []
    for record, code in zip(records, (15, 0), strict=True):
        sent = method.assign(model, record)
        layers = {
            name: QuantizedLayer(
                np.full(GRAPH.weight_shape(name), min(code, 2**layer.bits - 1), np.uint8),
                layer.bits,
                np.full_like(layer.step, 1),
            )
            for name, layer in sent.layers.items()
        }
        updates.append(Update(1, record.client, record.samples, pack_layers(layers), sent.side, 1.0, 0.5))
    found = method.merge(model, updates)
    for name, layer in method.quantizer(model).layers(method.deal(model, records[0])).items():
        moved = (found.weights[name] - model.weights[name]) / layer.step
        top = (2**layer.bits - 1) / 512
        inside = np.abs(model.weights[name] / layer.step - (layer.codes - (2**layer.bits - 1) / 2)) < 0.4
        np.testing.assert_allclose(moved[inside], (top - 3 * top) / 4, atol=1e-3)
