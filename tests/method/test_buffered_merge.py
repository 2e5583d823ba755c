"""Changes of several versions of the model in one merge: exact, in any order, and as the formula has it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.exchange.messages import TrainingPlan, Update, bit_widths, pack_layers, unpack_layers
from fedmpq.lab.experiment import ExperimentError
from fedmpq.method.aggregate import MergeError
from fedmpq.method.buffered_merge import Version, moved_side
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import Recipe, fedmpq
from fedmpq.method.registry import MethodError, buffering_method
from fedmpq.method.staleness import REFUSALS, Buffering
from fedmpq.method.state import ClientRecord, GlobalModel
from tests.lab.small_experiment import small
from tests.method.test_merging import returned
from tests.method.test_quantized_method import assert_same
from tests.server.small_model import GRAPH, first_state

BUFFERING = Buffering(4, 0.5, 3)
BEST = replace(fedmpq("best", TrainingPlan()), aggregation="mean", buffering=BUFFERING)
CODES = replace(fedmpq("paper", TrainingPlan()), merge="deltas", buffering=BUFFERING)
RECIPES = [BEST, CODES, replace(BEST, per_channel=True, share_limit=None, averaging=0.0)]


class Fleet:
    """A method, and models that come one after the other, with what clients have made of each."""

    def __init__(self, recipe: Recipe, clients: int, versions: int, seed: int) -> None:
        self.method = QuantizedMethod(GRAPH, recipe, 0)
        self._random = np.random.default_rng(seed)
        budgets = (2.0, 4.0, 5.5, 8.0)
        records = [
            ClientRecord(n, budgets[n % 4], int(self._random.integers(20, 60))) for n in range(clients)
        ]
        first = self.method.start(*first_state(seed), records)
        self.models = [first]
        for number in range(1, versions):
            weights, side = first_state(seed + number)
            self.models.append(replace(first, round=number, weights=weights, side=side))
        self.versions = {model.round: self.method.version(model) for model in self.models}

    @property
    def newest(self) -> GlobalModel:
        return self.models[-1]

    def update(self, client: int, version: int) -> Update:
        model, random = self.models[version], self._random
        record = model.clients[client]
        sent = self.method.assign(model, record)
        self.versions[version] = self.versions[version].sent_to(record, bit_widths(GRAPH, sent.layers))
        layers = {
            name: returned(self.method.recipe, layer, random)
            for name, layer in unpack_layers(GRAPH, sent.layers).items()
        }
        side = {n: t + np.float32(abs(random.normal(0, 0.01))) for n, t in sent.side.items()}
        return Update(version + 1, client, record.samples, pack_layers(layers), side, 1.0, 0.5)

    def merged(self, updates: list[Update]) -> GlobalModel:
        buffer = self.method.buffer(self.newest, self.versions)
        for update in updates:
            buffer.add(update)
        return buffer.finish()


SENDERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=8, unique=True)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(RECIPES), st.integers(1, 6))
def test_changes_of_the_newest_version_are_a_round(seed: int, recipe: Recipe, senders: int) -> None:
    fleet = Fleet(recipe, 6, 1, seed)
    updates = [fleet.update(client, 0) for client in range(senders)]
    plain = QuantizedMethod(GRAPH, replace(recipe, buffering=None), 0)
    assert_same(fleet.merged(updates), plain.merge(fleet.newest, updates))


@settings(max_examples=25)
@given(st.integers(0, 1000), st.sampled_from(RECIPES), SENDERS, st.data())
def test_changes_come_in_any_order(
    seed: int, recipe: Recipe, senders: list[tuple[int, int]], data: st.DataObject
) -> None:
    fleet = Fleet(recipe, 6, 4, seed)
    updates = [fleet.update(client, version) for client, version in senders]
    expected = fleet.merged(updates)
    assert_same(fleet.merged(data.draw(st.permutations(updates))), expected)
    last = dict(sorted(senders, key=lambda both: both[1]))
    for record in expected.clients:
        known = fleet.versions[last[record.client]].model if record.client in last else None
        assert record.dealt == (known.dealt[record.client] if known else None)
    assert expected.round == fleet.newest.round + 1


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(RECIPES), SENDERS)
def test_the_merge_is_the_weighted_mean_of_changes_in_real_numbers(
    seed: int, recipe: Recipe, senders: list[tuple[int, int]]
) -> None:
    fleet = Fleet(recipe, 6, 4, seed)
    updates = [fleet.update(client, version) for client, version in senders]
    found, newest = fleet.merged(updates), fleet.newest
    weights = []
    for client, version in senders:
        record = newest.clients[client]
        own = record.samples * (record.budget if recipe.weigh_by == "bits" else 1.0)
        if recipe.share_limit is not None:
            own = min(own, recipe.share_limit * float(np.median([one.samples for one in newest.clients])))
        weights.append(own / math.sqrt(1 + newest.round - version))
    for name, before in newest.weights.items():
        moved = np.zeros(before.shape)
        for update, weight in zip(updates, weights, strict=True):
            base = fleet.versions[update.round - 1]
            merging = fleet.method._merging(base.model, base.quantizer)
            place = [node.name for node in GRAPH.layers].index(name)
            origin = merging.origin(name, base.model.dealt[update.client][place])
            whole = origin.changes([update.layers[name]]).of(0, before.size)
            rows = whole.reshape(len(origin.unit), -1) * origin.unit
            moved += weight * rows.reshape(before.shape)
        expected = before + moved / sum(weights)
        # Weights are rounded to whole numbers of 2^22, and factors to those of 2^16.
        assert np.allclose(found.weights[name], expected, rtol=1e-4, atol=1e-4 * np.abs(moved).max())
    for name, tensor in found.side.items():
        sides = [
            moved_side(update.side, fleet.models[update.round - 1].side, newest.side)[name]
            for update in updates
        ]
        assert np.allclose(tensor, np.average(sides, axis=0, weights=weights), rtol=1e-4, atol=1e-5)


def test_side_tensors_keep_what_was_learnt_meanwhile() -> None:
    def side(**values: float) -> dict[str, np.ndarray]:
        names = {"scale": "bn.weight", "mean": "bn.running_mean", "clip": "q.clip"}
        return {names[key]: np.array(value, np.float32) for key, value in values.items()}

    sent, newest = side(scale=1.0, mean=5.0, clip=2.0), side(scale=1.5, mean=7.0, clip=1.0)
    moved = moved_side(side(scale=0.75, mean=6.0, clip=0.5), sent, newest)
    assert moved == side(scale=1.25, mean=6.0, clip=0.25)
    # A sum would have made the clip negative.
    assert 0.5 + (1.0 - 2.0) < 0 < moved["q.clip"]
    same = side(scale=0.1, mean=0.3, clip=0.7)
    assert moved_side(same, sent, sent) == same


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 8.0]))
def test_what_a_stale_change_counts(staleness: int, power: float) -> None:
    factor = Buffering(1, power, 1000).factor(staleness)
    assert Fraction(factor) * 65536 == int(factor * 65536) >= 1
    assert abs(factor - (1 + staleness) ** -power) <= 2**-16
    assert Buffering(1, power).factor(0) == 1.0
    assert factor >= Buffering(1, power).factor(staleness + 1)


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    fleet = Fleet(BEST, 4, 6, 0)
    updates = [fleet.update(0, 5), fleet.update(1, 3)]
    expected = fleet.merged(updates)
    stale, unknown = fleet.update(2, 1), replace(updates[0], round=9)
    stranger = replace(updates[0], client=17)
    buffer = fleet.method.buffer(fleet.newest, fleet.versions)
    for update in updates:
        buffer.add(update)
    for wrong, words in (
        (stale, r"version 1 of the model, 4 merges ago; staleness_limit = 3"),
        (unknown, r"version 8 of the model; those in flight are 0, 1, 2, 3, 4, 5"),
        (stranger, "does not have that client"),
        (updates[1], "client 1 sent two updates"),
    ):
        with pytest.raises(MergeError, match=words):
            buffer.add(wrong)
    assert_same(buffer.finish(), expected)
    with pytest.raises(MergeError, match="no change to merge"):
        fleet.method.buffer(fleet.newest, fleet.versions).finish()
    with pytest.raises(MergeError, match="merges in rounds"):
        QuantizedMethod(GRAPH, replace(BEST, buffering=None), 0).buffer(fleet.newest, {})


def test_a_version_knows_whom_it_was_sent_to() -> None:
    fleet = Fleet(BEST, 3, 1, 0)
    model = replace(fleet.newest, clients=())
    version = Version(model, fleet.method.quantizer(fleet.newest))
    for client in (2, 0):
        version = version.sent_to(fleet.newest.clients[client], (client + 1,) * 3)
    assert [record.client for record in version.model.clients] == [0, 2]
    assert version.model.dealt == {2: (3, 3, 3), 0: (1, 1, 1)}


BOARDS: dict[str, Any] = {"boards": {}}


@pytest.mark.parametrize("rule", sorted(REFUSALS))
def test_rules_that_need_a_round_are_refused_with_the_reason(rule: str) -> None:
    with pytest.raises(
        ExperimentError, match=rf"aggregation = '{rule}' does not go with asynchronous: it com"
    ):
        small(asynchronous=2, aggregation=rule, **BOARDS)


def test_settings_that_do_not_go_together() -> None:
    for changes, words in (
        ({"profile": "paper"}, "merge = 'models' does not go with asynchronous"),
        ({"method": "fp32"}, "not with fp32: it sums changes of several versions"),
        ({"boards": None}, "asynchronous needs boards"),
        ({"asynchronous": 0}, "asynchronous = 0 is too small"),
        ({"asynchronous": 5}, "5 changes a merge, and there are 4 clients"),
        ({"staleness_power": 9.0}, "staleness_power = 9.0 is outside 0..8"),
        ({"staleness_limit": -1}, "staleness_limit = -1 is outside 0..1000"),
    ):
        with pytest.raises(ExperimentError, match=words):
            small(**{"asynchronous": 2, **BOARDS, **changes})
    assert small(asynchronous=2, **BOARDS).recipe().aggregation == "mean"
    assert small(**BOARDS).recipe().aggregation == "agreement"


def test_a_method_with_a_merge_of_its_own_cannot_be_buffered() -> None:
    class Own(QuantizedMethod):
        def merge(self, model: GlobalModel, updates: object) -> GlobalModel:
            return model

    assert isinstance(buffering_method(QuantizedMethod(GRAPH, BEST, 0)), QuantizedMethod)
    with pytest.raises(MethodError, match="Own merges by itself"):
        buffering_method(Own(GRAPH, BEST, 0))
