"""Populations: clients drawn by number, at a cost that goes by who takes part, not by how many there are."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.lab import simulation
from fedmpq.lab.checkpoint import FILE_NAME, CheckpointError, load_checkpoint
from fedmpq.lab.drawn_partition import DrawnPartition
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.fleet import chosen, drawn_numbers, knowing
from fedmpq.lab.partition import PartitionError, class_histogram, dirichlet_partition
from fedmpq.lab.round_log import read_log
from fedmpq.lab.run import RunError, load_run
from fedmpq.lab.simulation import Prepared, Progress, prepare, reopen, run
from fedmpq.method.archive import Tensors
from fedmpq.method.registry import integer_method
from fedmpq.model.randomness import SERVER, Draws, Purpose
from tests.cost import cpu_seconds
from tests.in_process import InProcessPool

MILLION = 1_000_000
LITTLE: dict[str, Any] = {
    "data": "digits",
    "model": "digits_cnn",
    "train_limit": 80,
    "test_limit": 40,
    "budgets": [2, 4, 8],
    "population": MILLION,
    "participation": 4e-6,
    "client_samples": 16,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 8,
}


def little(**changes: object) -> Experiment:
    return make_experiment({**LITTLE, **changes})


def silent(_: Progress) -> None:
    pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)


# Who is in a round


@given(st.integers(0, 2**32 - 1), st.integers(1, 500), st.integers(1, 300), st.integers(1, 300))
def test_numbers_are_drawn_one_after_the_other(seed: int, number: int, one: int, other: int) -> None:
    count, population = min(one, other), max(one, other)
    drawn = drawn_numbers(seed, number, population, count)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == count
    assert set(drawn) <= set(range(population))
    if 2 * count <= population:
        assert drawn == sorted(slowly(seed, number, population, count))
    else:
        left_out = slowly(seed, number, population, population - count) if count < population else []
        assert set(drawn) == set(range(population)) - set(left_out)


def slowly(seed: int, number: int, population: int, count: int) -> list[int]:
    found: list[int] = []
    for step in range(1000):
        uniform = Draws(seed, SERVER, number).uniform(2 * count, Purpose.SELECT, step=step)
        for high, low in zip(uniform[:count], uniform[count:], strict=True):
            one = math.floor((float(high) + float(low) / 2**24) * population)
            if one not in found:
                found.append(one)
            if len(found) == count:
                return found
    raise AssertionError("too few")


def test_everybody_is_drawn_equally_often() -> None:
    rounds, population, count = 2000, 40, 10
    times = np.bincount([n for r in range(rounds) for n in drawn_numbers(3, r, population, count)])
    share = count / population
    assert np.abs(times - rounds * share).max() < 6 * math.sqrt(rounds * share * (1 - share))


# Which samples they have


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.sampled_from([1e-3, 0.1, 1.0, 1e6, math.inf]),
    st.integers(0, 2**64),
    st.integers(0, MILLION - 1),
    st.integers(2, 60),
)
def test_parts_repeat_and_hold_nothing_twice(
    classes: list[int], alpha: float, seed: int, client: int, samples: int
) -> None:
    labels = np.array(classes, np.int64)
    part = DrawnPartition(labels, MILLION, alpha, seed, samples)[client]
    assert part.dtype == np.int64
    assert len(part) == samples
    assert part.min() >= 0
    assert part.max() < len(labels)
    assert np.array_equal(part, np.sort(part))
    for of_class in set(classes):
        mine = part[labels[part] == of_class]
        if len(mine) <= classes.count(of_class):
            assert len(set(mine.tolist())) == len(mine)
    assert np.array_equal(part, DrawnPartition(labels, MILLION, alpha, seed, samples)[client])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0, math.inf])
def test_a_clients_classes_are_spread_as_in_the_exact_split(alpha: float) -> None:
    """Classes of unlike sizes; the exact split of many images to many clients is what is aimed at."""
    labels = np.repeat(np.arange(4), [160_000, 80_000, 40_000, 40_000])
    clients, samples = 400, 80
    drawn = DrawnPartition(labels, clients, alpha, 1, samples)
    exact = [part for part in dirichlet_partition(labels, clients, alpha, 1, 0) if len(part)]
    mine, theirs = (
        counts / counts.sum(axis=1, keepdims=True)
        for counts in (class_histogram(labels, list(parts), 4) for parts in (drawn, exact))
    )
    # Drawing 80 samples by chance adds q (1 - q) / 80 to the variance, at most 0.0032.
    assert mine.mean(axis=0) == pytest.approx(theirs.mean(axis=0), abs=0.07)
    assert mine.var(axis=0) == pytest.approx(theirs.var(axis=0), abs=0.02)


def test_unlike_clients_have_unlike_samples() -> None:
    labels = np.zeros(10_000, np.int64)
    parts = DrawnPartition(labels, MILLION, 0.5, 0, 20)
    assert len({tuple(parts[client].tolist()) for client in range(100)}) == 100
    assert tuple(parts[5].tolist()) != tuple(DrawnPartition(labels, MILLION, 0.5, 1, 20)[5].tolist())
    with pytest.raises(IndexError, match="no client 1000000"):
        parts[MILLION]


# What it costs


def planned(prepared: Prepared) -> int:
    """Choose the clients of a round, draw their samples, make what they are sent; how many there are."""
    start, experiment = prepared.start, prepared.experiment
    method = integer_method(experiment, start.graph)
    clients = chosen(experiment, prepared.parts, start.model)
    model = knowing(start.model, clients)
    for client in clients:
        method.assign(model, client)
    return len(clients)


def peak_bytes(prepared: Prepared) -> int:
    tracemalloc.start()
    try:
        assert planned(prepared) == 100
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_planning_a_round_costs_the_same_for_a_million_clients_as_for_a_thousand() -> None:
    """Within half as much again of the memory, and twice the time."""
    few, many = (prepare(little(population=count, participation=100 / count)) for count in (1000, MILLION))
    assert peak_bytes(many) < 1.5 * peak_bytes(few)
    assert cpu_seconds(lambda: planned(many), 3) < 2 * cpu_seconds(lambda: planned(few), 3)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_checkpoint_holds_who_took_part(tmp_path: Path) -> None:
    experiment = little()
    run(prepare(experiment), tmp_path, 1, silent)
    seen = {client for result in read_log(tmp_path) for client in result.clients}
    assert len(seen) == 8
    assert max(seen) > 10_000
    checkpoint = load_checkpoint(tmp_path)
    kept = checkpoint.model.clients
    assert {record.client for record in kept} == {0, 1, 2, *seen}
    assert [record.client for record in kept if record.dealt is not None] == sorted(seen)
    assert all(record.budget == (2, 4, 8)[record.client % 3] for record in kept)
    assert all(record.samples == 16 for record in kept)
    assert (tmp_path / FILE_NAME).stat().st_size < 300_000
    shares = read_log(tmp_path)[-1].accuracies
    assert shares is not None
    assert shares.deployed.keys() == {"2", "4", "8"}
    opened = load_run(tmp_path)
    assert opened.client(max(seen)).client == max(seen)
    assert opened.budgets == (2.0, 4.0, 8.0)
    with pytest.raises(RunError, match="has no client 999999"):
        opened.client(999_999)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    run(prepare(little(rounds=3)), tmp_path / "whole", 1, silent)
    broken = prepare(little(rounds=3))

    def stop(progress: Progress) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(broken, tmp_path / "broken", 1, stop)
    run(reopen(tmp_path / "broken"), tmp_path / "broken", 1, silent)
    mine, yours = (load_checkpoint(tmp_path / name).model for name in ("broken", "whole"))
    assert mine.clients == yours.clients
    left, right = (Tensors.of(model).to_arrays() for model in (mine, yours))
    assert all(tensor.tobytes() == right[name].tobytes() for name, tensor in left.items())


@pytest.mark.usefixtures("in_process")
def test_a_checkpoint_of_other_clients_is_refused(tmp_path: Path) -> None:
    prepared = prepare(little())
    clients = prepared.start.model.clients
    strange = (*clients, replace(clients[0], client=10, budget=7.0))
    start = replace(prepared.start, model=replace(prepared.start.model, clients=strange))
    run(replace(prepared, start=start, experiment=little(rounds=1)), tmp_path, 1, silent)
    with pytest.raises(CheckpointError, match="its clients are not those of its experiment"):
        load_checkpoint(tmp_path)


# Samples dealt by a function of one's own


class Every:
    """Client n of so many has every so-manieth sample."""

    def __init__(self, samples: int, clients: int) -> None:
        self.samples, self.clients = samples, clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        return np.arange(client % self.clients, self.samples, self.clients)


def every(labels: NDArray[np.int64], clients: int, seed: int) -> Every:
    return Every(len(labels), min(clients, 10))


def too_few(labels: NDArray[np.int64], clients: int, seed: int) -> list[list[int]]:
    return [[0]] * clients


def beyond(labels: NDArray[np.int64], clients: int, seed: int) -> list[list[int]]:
    return [[0, len(labels)]] * clients


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("population", [None, MILLION])
def test_ones_own_partition_is_drawn_from_lazily(tmp_path: Path, population: int | None) -> None:
    share = 1.0 if population is None else 4e-6
    changes = {"partition": f"{__name__}:every", "population": population, "participation": share}
    prepared = prepare(little(rounds=1, **changes))
    divisor = 3 if population is None else 10
    assert prepared.parts[2].tolist() == list(range(2, 80, divisor))
    (result,) = run(prepared, tmp_path, 1, silent)
    (stored,) = [
        json.loads(line)
        for line in (tmp_path / "rounds.jsonl").read_text().splitlines()
        if '"type": "experiment"' in line
    ]
    assert stored["partition"] == f"{__name__}:every"
    assert len(result.clients) == (3 if population is None else 4)
    reopen(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("too_few", r"gives client 0 an array of shape \(1,\)"),
        ("beyond", "gives client 0 the samples 0 to 80, and there are 0 to 79"),
    ],
)
def test_a_partition_that_does_not_fit_is_named(name: str, expected: str) -> None:
    with pytest.raises(PartitionError, match=expected):
        prepare(little(partition=f"{__name__}:{name}"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"population": 2}, "population = 2 is outside 3..2147483648"),
        ({"population": 2**31 + 1}, "population = 2147483649 is outside"),
        ({"client_samples": 1}, "client_samples = 1 is too small; the least is 2"),
        ({"partition": "mine"}, "partition = 'mine' is not package.module:function"),
        ({"alpha": 1e-9}, "alpha is 1e-09, must lie in"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises((ExperimentError, PartitionError), match=expected):
        prepare(little(**changes))
