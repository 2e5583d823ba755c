"""Asynchronous rounds in simulation: which change comes when is the virtual clock's to say, nobody else's."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.exchange.messages import Assignment, Update
from fedmpq.lab import simulation
from fedmpq.lab.asynchronous import drawn_client
from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.pool import Pool
from fedmpq.lab.round_log import read_log
from fedmpq.lab.simulation import Progress, prepare, reopen, run
from fedmpq.method.registry import buffering_method, integer_method
from tests.in_process import InProcessPool
from tests.lab.replayed import replayed
from tests.lab.small_experiment import silent, small
from tests.lab.test_simulation import assert_same_model, assert_same_run

SPEEDS = {
    "seconds_per_sample": 0.01,
    "jitter": 0.3,
    "board": [{"clients": [1], "seconds_per_sample": 0.1}, {"clients": [3], "up": 20_000.0}],
}


def buffered(**changes: object) -> Experiment:
    """Four boards, one of them slow, of which three are at work at a time."""
    return small(**{"asynchronous": 2, "rounds": 5, "boards": SPEEDS, "evaluate_every": 5, **changes})


def finish(experiment: Experiment, folder: Path, workers: int = 1) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WorkerPool", InProcessPool)
        run(prepare(experiment), folder, workers, silent)
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(buffered(), tmp_path_factory.mktemp("unbroken"))


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(unbroken: Path, tmp_path: Path) -> None:
    run(prepare(buffered()), tmp_path, 2, silent)
    assert_same_run(unbroken, tmp_path)


class Crash(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_run_that_is_broken_off_ends_as_an_unbroken_one(unbroken: Path, tmp_path: Path, after: int) -> None:
    def listener(progress: Progress) -> None:
        if progress.round == after + 1 and progress.done == 1:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WorkerPool", InProcessPool)
        with pytest.raises(Crash):
            run(prepare(buffered()), tmp_path, 1, listener)
        assert load_checkpoint(tmp_path).model.round == after
        run(reopen(tmp_path), tmp_path, 1, silent)
    assert_same_run(unbroken, tmp_path)


def test_the_recorded_history_gives_the_same_model(unbroken: Path) -> None:
    prepared = prepare(buffered())
    method = buffering_method(integer_method(prepared.experiment, prepared.start.graph))
    data = prepared.experiment, prepared.start.graph, prepared.train, prepared.test, prepared.parts
    facts = [result.facts() for result in read_log(unbroken)]
    with closing(InProcessPool(*data)) as pool:
        integers = cast("Pool[Assignment, Update]", pool)
        models = replayed(method, prepared.start.model, facts, integers)
    ended = load_checkpoint(unbroken).model
    for name, tensor in models[-1].weights.items():
        assert tensor.tobytes() == ended.weights[name].tobytes()
    assert (models[-1].bit_widths, models[-1].clients) == (ended.bit_widths, ended.clients)
    staleness = [part.staleness for each in facts for part in each.clients]
    assert min(staleness) == 0 < max(staleness)


def test_changes_arrive_when_the_clock_says(unbroken: Path) -> None:
    """Another way to the same: everybody's arrival is computed at once, and looked for by hand."""
    experiment = buffered()
    clock = experiment.clock
    assert clock is not None
    samples = [len(part) for part in prepare(experiment).parts]
    bytes_of = {
        (part.client, result.round - 1 - part.staleness): part
        for result in read_log(unbroken)
        for part in result.parts
    }
    now = turn = 0
    open_flights: dict[int, tuple[int, int]] = {}
    for result in read_log(unbroken):
        version, served = result.round - 1, set[int]()
        merged: list[tuple[int, int]] = []
        while len(merged) < 2:
            while len(open_flights) < 3 and len(busy := open_flights.keys() | served) < 4:
                client = drawn_client(experiment, turn, set(busy))
                turn += 1
                served.add(client)
                # A change that is never merged has no bytes on record; it arrives after all that were.
                part = bytes_of.get((client, version))
                arrives = 10**15
                if part is not None:
                    arrives = now + clock.sent(client, part.bytes_up)
                    arrives += clock.trained(client, version + 1, samples[client], part.bytes_down)
                open_flights[client] = arrives, version
            client = min(open_flights, key=lambda one: (open_flights[one][0], one))
            now, sent = open_flights.pop(client)
            merged.append((sent, client))
        assert sorted(merged) == [(version - part.staleness, part.client) for part in result.parts]
        assert result.virtual_time == now / 1e6


@pytest.mark.parametrize("profile", ["best", "paper"])
def test_equal_boards_that_are_all_waited_for_are_rounds(tmp_path: Path, profile: str) -> None:
    """No change is ever stale then: synchronous rounds with a mean, to the bit."""
    equal = {"boards": {"latency": 1.0, "seconds_per_sample": 0.0, "up": 1e9, "down": 1e9}}
    plain = {"participation": 1.0, "rounds": 2, "profile": profile, "merge": "deltas", **equal}
    one = finish(small(aggregation="mean", **plain), tmp_path / "rounds")
    other = finish(small(asynchronous=4, **plain), tmp_path / "buffered")
    assert_same_model(load_checkpoint(one).model, load_checkpoint(other).model)
    mine, yours = read_log(one), read_log(other)
    assert [replace(each, seconds=0.0, phases={}) for each in mine] == [
        replace(each, seconds=0.0, phases={}) for each in yours
    ]


def test_a_change_that_is_too_old_is_dropped_with_a_word(tmp_path: Path) -> None:
    slow = {"seconds_per_sample": 0.001, "board": [{"clients": [1], "seconds_per_sample": 0.05}]}
    folder = finish(
        buffered(boards=slow, staleness_limit=1, rounds=9, participation=1.0, evaluate_every=9), tmp_path
    )
    late = [part for result in read_log(folder) for part in result.parts if part.outcome == "late"]
    assert late[0].client == 1
    assert late[0].staleness >= 2
    assert "version 0 of the model" in late[0].reason
    assert "staleness_limit = 1" in late[0].reason
    for result in read_log(folder):
        trained = [part for part in result.parts if part.outcome == "trained"]
        assert len(trained) == 2
        assert all(part.staleness <= 1 for part in trained)
        assert set(result.clients) == {part.client for part in trained}
    # Their bytes have been sent all the same.
    assert all(part.bytes_up > 0 < part.bytes_down for part in late)


def test_nobody_is_sent_a_version_twice_nor_works_twice_at_a_time(unbroken: Path) -> None:
    sent = [
        (part.client, result.round - part.staleness) for result in read_log(unbroken) for part in result.parts
    ]
    flights = load_checkpoint(unbroken).flights
    assert flights is not None
    sent += [(flight.client, flight.version + 1) for flight in flights.open]
    assert len(set(sent)) == len(sent)
    at_work = [flight.client for flight in flights.open]
    assert 0 < len(set(at_work)) == len(at_work) <= 3
    assert {flight.version for flight in flights.open} == flights.versions.keys()


def test_clients_of_a_population_are_drawn_as_they_are_needed(tmp_path: Path) -> None:
    many = {"population": 1000, "participation": 0.003, "client_samples": 8, "budgets": [2, 4]}
    folder = finish(buffered(**many, boards={"spread": 10}, rounds=3, evaluate_every=3), tmp_path)
    clients = {part.client for result in read_log(folder) for part in result.parts}
    assert len(clients) >= 4
    assert max(clients) > 2
    known = [record.client for record in load_checkpoint(folder).model.clients]
    assert {0, 1} | clients <= set(known)
    assert len(known) < 20


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.sets(st.integers(0, 3), max_size=3))
def test_a_board_is_drawn_of_those_that_are_free(seed: int, turn: int, busy: set[int]) -> None:
    experiment = replace(EXPERIMENT, seed=seed)
    assert drawn_client(experiment, turn, busy) in set(range(4)) - busy
    assert drawn_client(experiment, turn, busy) == drawn_client(experiment, turn, busy)


EXPERIMENT = buffered()


def test_boards_are_drawn_evenly() -> None:
    drawn = [drawn_client(EXPERIMENT, turn, {2}) for turn in range(900)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[2] == 0
    assert (np.abs(counts[[0, 1, 3]] - 300) < 75).all()
