"""Workers on Ray that sum their clients' changes: whoever is lost when, the sum is that of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from fedmpq.exchange.messages import Assignment, Update
from fedmpq.lab import ray_pool
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.merged_updates import MergedHere, MergedOnTheWay, merging
from fedmpq.lab.pool import Trained, WorkerError
from fedmpq.lab.ray_pool import RayPool
from fedmpq.lab.simulation import Prepared, prepare
from fedmpq.lab.worker import Worker
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.registry import integer_method
from fedmpq.method.running_merge import PartialMerge
from tests.in_process import InProcessPool
from tests.lab.fake_ray import FakeRay
from tests.lab.small_experiment import small
from tests.method.test_quantized_method import assert_same

CLIENTS = 11
MEAN = {"aggregation": "mean", "budgets": [2, 4, 8] * 3 + [4, 6]}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(small(**MEAN))


def method_of(experiment: Experiment, prepared: Prepared) -> QuantizedMethod:
    method = integer_method(experiment, prepared.start.graph)
    assert isinstance(method, QuantizedMethod)
    return method


@pytest.fixture(scope="module")
def updates(prepared: Prepared) -> dict[int, Update]:
    """What the clients give back, trained once for all tests."""
    method, model = method_of(prepared.experiment, prepared), prepared.start.model
    given = prepared.experiment, prepared.start.graph, prepared.train, prepared.test, prepared.parts
    with closing(InProcessPool(*given)) as pool:
        found = pool.train([method.assign(model, client) for client in model.clients])
        return {each.client: each for each in found if isinstance(each, Update)}


class Fleet:
    """A pool on a Ray that loses some, whose workers know what their clients give back."""

    def __init__(
        self,
        prepared: Prepared,
        updates: dict[int, Update],
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        loss: float,
    ) -> None:
        self.trained: list[int] = []
        self.ray = ray = FakeRay(seed, loss)

        class Cluster:
            cores = 3

            def __init__(self, on: str) -> None:
                self.ray = ray

            def close(self) -> None:
                pass

        def train(_: Worker, assignment: Assignment, part: Any) -> Update:
            self.trained.append(assignment.client)
            return updates[assignment.client]

        monkeypatch.setattr(ray_pool, "Cluster", Cluster)
        monkeypatch.setattr(ray_pool, "SUMMED_FROM", 3)
        monkeypatch.setattr(Worker, "train", train)
        data = prepared.train, prepared.test, prepared.parts
        self.pool: RayPool[Assignment, Update] = RayPool(
            prepared.experiment, prepared.start.graph, *data, on="ray"
        )


@pytest.mark.parametrize("kept", [1, 2, 64])
@pytest.mark.parametrize("seed", range(8))
def test_the_sum_is_that_of_all_clients_whatever_is_lost(
    seed: int,
    kept: int,
    prepared: Prepared,
    updates: dict[int, Update],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_pool, "KEPT", kept)
    monkeypatch.setattr(ray_pool, "FAN_IN", 2 + seed % 2)
    # Here it may take long; when it is enough is another test's.
    monkeypatch.setattr(ray_pool, "LOSSES", 1000)
    monkeypatch.setattr(ray_pool, "FUTILE_LOSSES", 1000)
    method, model = method_of(prepared.experiment, prepared), prepared.start.model
    fleet = Fleet(prepared, updates, monkeypatch, seed, loss=0.0 if seed == 0 else 0.04)
    with closing(fleet.pool):
        round_ = merging(method, fleet.pool, model, CLIENTS)
        assert isinstance(round_, MergedOnTheWay)
        for _ in range(2):  # the next round begins anew
            told = list(round_.train([method.assign(model, client) for client in model.clients]))
            assert_same(round_.merged(), method.merge(model, [updates[n] for n in range(CLIENTS)]))
            assert sorted(each.client for each in told) == list(range(CLIENTS))
    sums = [each for each in fleet.ray.fetched if isinstance(each, PartialMerge)]
    assert len(sums) == 2, "one of each round comes here"
    assert not any(isinstance(each, Update) for each in fleet.ray.fetched)
    if seed == 0:
        assert sorted(fleet.trained) == sorted(2 * list(range(CLIENTS)))


def test_losses_of_every_kind_were_among_them(
    prepared: Prepared, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would not say much."""
    monkeypatch.setattr(ray_pool, "KEPT", 2)
    monkeypatch.setattr(ray_pool, "FAN_IN", 2)
    monkeypatch.setattr(ray_pool, "LOSSES", 1000)
    monkeypatch.setattr(ray_pool, "FUTILE_LOSSES", 1000)
    method, model, lost = method_of(prepared.experiment, prepared), prepared.start.model, set[str]()
    for seed in range(1, 8):
        fleet = Fleet(prepared, updates, monkeypatch, seed, loss=0.04)
        with closing(fleet.pool):
            assignments = [method.assign(model, one) for one in model.clients]
            list(merging(method, fleet.pool, model, CLIENTS).train(assignments))
        lost |= set(fleet.ray.lost_with)
    assert {"train_summed", "hand_on", "combine", "object"} <= lost


def test_a_sum_that_is_lost_again_and_again_is_an_error(
    prepared: Prepared, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, model = method_of(prepared.experiment, prepared), prepared.start.model
    fleet = Fleet(prepared, updates, monkeypatch, 0, 0.0)

    def fails(*_: object) -> None:
        raise fleet.ray.exceptions.RayError("out of memory")

    monkeypatch.setattr(ray_pool.RayWorker, "hand_on", fails)
    with closing(fleet.pool), pytest.raises(WorkerError, match=r"lost with a sum over .* clients.*of memory"):
        list(fleet.pool.train_summed(model, [method.assign(model, client) for client in model.clients]))


def test_what_is_told_is_what_an_update_says(
    prepared: Prepared, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, model = method_of(prepared.experiment, prepared), prepared.start.model
    assignments = [method.assign(model, client) for client in model.clients]
    fleet = Fleet(prepared, updates, monkeypatch, 0, 0.0)
    with closing(fleet.pool):
        found = told(merging(method, fleet.pool, model, CLIENTS).train(assignments))
        assert found == told(MergedHere(method, fleet.pool, model).train(assignments))
    assert all(np.isfinite(each.loss) and each.bytes_up for each in found)


def test_a_few_updates_come_as_they_are(
    prepared: Prepared, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three for each of three workers are summed, and fewer are not."""
    method, model = method_of(prepared.experiment, prepared), prepared.start.model
    fleet = Fleet(prepared, updates, monkeypatch, 0, 0.0)
    with closing(fleet.pool):
        assert isinstance(merging(method, fleet.pool, model, 9), MergedOnTheWay)
        assert isinstance(merging(method, fleet.pool, model, 8), MergedHere)


def told(trained: Iterator[Trained]) -> list[Trained]:
    return sorted(trained, key=lambda each: each.client)


@pytest.mark.parametrize("changes", [{"aggregation": "agreement"}, {"merge": "models", "profile": "paper"}])
def test_other_rules_have_all_updates_come_here(
    changes: dict[str, str], prepared: Prepared, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(small(**{**MEAN, **changes}), prepared)
    fleet = Fleet(prepared, updates, monkeypatch, 0, 0.0)
    with closing(fleet.pool):
        assert isinstance(merging(method, fleet.pool, prepared.start.model, CLIENTS), MergedHere)

        class Own(QuantizedMethod):
            pass

        own = Own(method.graph, method_of(prepared.experiment, prepared).recipe, 0)
        assert isinstance(merging(own, fleet.pool, prepared.start.model, CLIENTS), MergedHere)
