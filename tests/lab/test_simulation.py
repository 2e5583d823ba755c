"""The simulator: one seed, one result; a run broken off in any way ends as an unbroken one does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import nn

from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import (
    Assignment,
    Calibration,
    TrainingPlan,
    Update,
    payload_bytes,
    rounded_side,
)
from fedmpq.lab import round_parts, simulation
from fedmpq.lab.checkpoint import FILE_NAME, Checkpoint, load_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.partition import PartitionError
from fedmpq.lab.pool import WorkerError
from fedmpq.lab.probes import FullProbe, IntegerProbe, Probe, probes_of
from fedmpq.lab.round_log import LOG_NAME, Accuracies, RoundResult, read_log
from fedmpq.lab.simulation import Prepared, Progress, prepare, reopen, run
from fedmpq.lab.workers import WorkerPool, default_workers
from fedmpq.method.archive import Tensors
from fedmpq.method.recipe import ABLATIONS
from fedmpq.method.registry import float_method, integer_method
from fedmpq.method.schedule import Schedule
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model import zoo
from fedmpq.model.calibration import statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import average_bits
from fedmpq.model.zoo import ModelError
from fedmpq.training.engine import TrainingError, engine_names
from fedmpq.training.local_round import require_finite
from tests.in_process import InProcessPool, Returned, Sent
from tests.lab.small_experiment import SMALL, silent, small


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)


def finish(experiment: Experiment, folder: Path, workers: int = 1) -> list[RoundResult]:
    return run(prepare(experiment), folder, workers, silent)


def without_time(results: list[RoundResult]) -> list[RoundResult]:
    return [replace(result, seconds=0.0, phases={}) for result in results]


def assert_same_model(one: GlobalModel, other: GlobalModel) -> None:
    assert (one.round, one.bit_widths, one.clients) == (other.round, other.bit_widths, other.clients)
    mine, yours = (Tensors.of(model).to_arrays() for model in (one, other))
    assert mine.keys() == yours.keys()
    assert all(tensor.tobytes() == yours[name].tobytes() for name, tensor in mine.items())


def probes(checkpoint: Checkpoint) -> list[Probe]:
    model = checkpoint.model
    if checkpoint.experiment.trains_floats:
        return probes_of(float_method(checkpoint.experiment, checkpoint.graph), model, model.clients)
    return probes_of(integer_method(checkpoint.experiment, checkpoint.graph), model, model.clients)


def assert_same_run(one: Path, other: Path) -> None:
    """The model, its average and what every device runs to the bit, and the same log but for the clock."""
    mine, yours = load_checkpoint(one), load_checkpoint(other)
    assert mine.experiment == yours.experiment
    assert_same_model(mine.model, yours.model)
    for left, right in zip(probes(mine), probes(yours), strict=True):
        assert left.clients == right.clients
        for name, layer in (left.layers if isinstance(left, IntegerProbe) else {}).items():
            assert isinstance(right, IntegerProbe)
            assert layer.planes.tobytes() == right.layers[name].planes.tobytes()
        assert all(tensor.tobytes() == right.side[name].tobytes() for name, tensor in left.side.items())
    assert without_time(read_log(one)) == without_time(read_log(other))


def strict_lines(folder: Path) -> list[dict[str, Any]]:
    """The log as any JSON reader takes it: one object a line, no NaN and no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / LOG_NAME).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# Real processes


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    finish(small(profile="best"), folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    finish(small(profile="best"), folder, workers=2)
    return folder


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(one_worker: Path, two_workers: Path) -> None:
    assert_same_run(one_worker, two_workers)


@pytest.mark.usefixtures("in_process")
def test_nor_do_processes_and_the_order_in_which_they_finish(two_workers: Path, tmp_path: Path) -> None:
    finish(small(profile="best"), tmp_path)
    assert_same_run(two_workers, tmp_path)


@pytest.mark.usefixtures("in_process")
def test_another_seed_changes_everything(two_workers: Path, tmp_path: Path) -> None:
    finish(small(profile="best", seed=1), tmp_path)
    one, other = load_checkpoint(two_workers).model, load_checkpoint(tmp_path).model
    assert all(tensor.tobytes() != other.weights[name].tobytes() for name, tensor in one.weights.items())


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One worker that is going to be killed."""
    prepared = prepare(small())
    parts = (prepared.experiment, prepared.start.graph, prepared.train, prepared.test, prepared.parts)
    pool: WorkerPool[Assignment, Update] = WorkerPool(*parts, 1)
    with closing(pool):
        yield pool


def processes(pool: WorkerPool) -> list[int]:
    return list(pool._pool._processes or {})


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_no_hang(pool: WorkerPool) -> None:
    prepared = prepare(small())
    method = integer_method(prepared.experiment, prepared.start.graph)
    assignments = [method.assign(prepared.start.model, client) for client in prepared.start.model.clients]
    updates = pool.train(assignments)
    assert next(updates).client in range(4)
    (worker,) = processes(pool)
    # Ctrl-C at a terminal goes to the whole group: the worker leaves it to its parent.
    os.kill(worker, signal.SIGINT)
    assert next(updates).client in range(4)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"a worker process died.*--workers"):
        list(updates)
    # And so is every task after it.
    with pytest.raises(WorkerError, match="a worker process died"):
        list(pool.train(assignments))
    with pytest.raises(WorkerError, match="a worker process died"):
        pool.scores(probes(prepared.start))


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_one_error_and_its_last_good_round(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a real process, over some rounds: first numbers that overflow, then a loss that is none."""
    wild = small(learning_rate=1e5, schedule="constant", rounds=50)
    with pytest.raises(
        TrainingError, match=r"client \d, round \d+: .*learning rate \(now 100000.0\)"
    ) as caught:
        finish(wild, tmp_path)
    assert capfd.readouterr() == ("", "")
    number = int(str(caught.value).split("round ")[1].split(":")[0])
    assert load_checkpoint(tmp_path).model.round == len(read_log(tmp_path)) == number - 1


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The model was there when the run began, and is gone where its workers look for it."""
    prepared = prepare(small(method="fp32"))
    gone = replace(prepared.experiment, model="no_such_module_at_all:build")
    parts = (gone, prepared.start.graph, prepared.train, prepared.test, prepared.parts)
    probe = FullProbe(prepared.start.model.weights, prepared.start.model.side)
    pool: WorkerPool[FloatAssignment, FloatUpdate] = WorkerPool(*parts, 1)
    with (
        closing(pool),
        pytest.raises(ModelError, match=r"no_such_module.*cannot be imported"),
    ):
        pool.scores([probe])


def test_one_worker_a_core_that_may_be_used() -> None:
    assert 1 <= default_workers() <= (os.cpu_count() or 1)


# Broken off and resumed


class Crash(Exception):
    pass


def broken_off(experiment: Experiment, folder: Path, after: int) -> None:
    """A run that dies in the middle of the round after `after`."""

    def listener(progress: Progress) -> None:
        if progress.round == after + 1 and progress.done == 1:
            raise Crash

    with pytest.raises(Crash):
        run(prepare(experiment), folder, 1, listener)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("settings", "averaged", "breaks"),
    [
        ({"profile": "paper"}, False, (0, 1, 2)),
        ({"profile": "best"}, True, (1, 2)),
        ({"profile": "best", "averaging": 0.0, "evaluate_every": 2}, False, (2,)),
        ({"method": "fp32", "statistics": "calibrated", "schedule": "cosine", "averaging": 0.8}, True, (1,)),
        ({"method": "fedpaq", "alpha": float("inf")}, False, (1,)),
    ],
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    tmp_path: Path, settings: dict[str, Any], averaged: bool, breaks: tuple[int, ...]
) -> None:
    experiment = small(rounds=3, **settings)
    whole = finish(experiment, tmp_path / "whole")
    assert (load_checkpoint(tmp_path / "whole").model.average is not None) == averaged
    for after in breaks:
        folder = tmp_path / f"broken{after}"
        broken_off(experiment, folder, after)
        assert load_checkpoint(folder).model.round == after
        results = run(reopen(folder), folder, 1, silent)
        assert_same_run(tmp_path / "whole", folder)
        assert without_time(results) == without_time(whole)
        assert [line["type"] for line in strict_lines(folder)] == ["experiment", "round", "round", "round"]


LONGER = {"schedule": "constant", "participation": 1.0}
"""With these a run that was to end earlier is the beginning of a longer one: a schedule that falls and the
clients that calibrate the last round depend on how many rounds there are."""


@pytest.fixture
def two_rounds(tmp_path: Path, in_process: None) -> Path:
    finish(small(**LONGER), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "tail",
    [
        '{"type": "round", "rou',
        '{"type": "round"',
        "\x00\x00\x00",
        "",
    ],
)
def test_a_log_with_a_torn_last_line_is_mended(two_rounds: Path, tmp_path: Path, tail: str) -> None:
    log = two_rounds / LOG_NAME
    before = read_log(two_rounds)
    log.write_text(log.read_text() + tail)
    assert read_log(two_rounds) == before
    run(reopen(two_rounds, 3), two_rounds, 1, silent)
    finish(small(rounds=3, **LONGER), tmp_path / "whole")
    assert_same_run(two_rounds, tmp_path / "whole")
    assert len(strict_lines(two_rounds)) == 4


def test_a_round_logged_but_not_checkpointed_runs_again(two_rounds: Path, tmp_path: Path) -> None:
    """Killed between the two writes: the log is one round ahead."""
    log = two_rounds / LOG_NAME
    ahead = strict_lines(two_rounds)[-1] | {"round": 3, "accuracy": 0.123}
    log.write_text(log.read_text() + json.dumps(ahead) + "\n")
    results = run(reopen(two_rounds, 3), two_rounds, 1, silent)
    assert shares(results[-1]).accuracy != 0.123
    assert [line.get("round") for line in strict_lines(two_rounds)] == [None, 1, 2, 3]


def test_a_log_that_lost_rounds_is_not_papered_over(two_rounds: Path) -> None:
    log = two_rounds / LOG_NAME
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(lines[0] + lines[2])
    with pytest.raises(ExperimentError, match="lacks round 1"):
        run(reopen(two_rounds), two_rounds, 1, silent)
    log.write_text('{"type": "round", "round": 1}\n')
    with pytest.raises(ExperimentError, match="line 1: not a line of this version's log"):
        run(reopen(two_rounds), two_rounds, 1, silent)
    log.unlink()
    with pytest.raises(ExperimentError, match=f"no {LOG_NAME}"):
        run(reopen(two_rounds), two_rounds, 1, silent)
    # A new run in its place needs nothing of it.
    log.write_text("rubbish\n[1, 2]\n")
    assert len(finish(small(rounds=1), two_rounds)) == 1
    assert len(strict_lines(two_rounds)) == 2


def test_a_finished_run_can_go_on_but_not_back(two_rounds: Path) -> None:
    before = (two_rounds / LOG_NAME).read_text()
    assert len(run(reopen(two_rounds), two_rounds, 1, silent)) == 2
    assert (two_rounds / LOG_NAME).read_text() == before
    assert len(run(reopen(two_rounds, 3), two_rounds, 1, silent)) == 3
    with pytest.raises(ExperimentError, match="has done 3 rounds; rounds = 2 is fewer"):
        reopen(two_rounds, 2)


@pytest.mark.usefixtures("in_process")
def test_rates_of_a_run_that_goes_on_are_those_of_its_new_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    class Pool(InProcessPool):
        def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
            sent = list(assignments)
            assert all(isinstance(one, Assignment) for one in sent)
            rates.extend({one.plan.learning_rate for one in sent if isinstance(one, Assignment)})
            yield from super().train(sent)

    monkeypatch.setattr(simulation, "WorkerPool", Pool)
    finish(small(), tmp_path)
    run(reopen(tmp_path, 4), tmp_path, 1, silent)
    expected = [(2, 1), (2, 2), (4, 3), (4, 4)]
    assert rates == [0.1 * Schedule("cosine", rounds).factor(number) for rounds, number in expected]


def test_other_data_is_noticed_on_reopening(tmp_path: Path, in_process: None) -> None:
    random = np.random.default_rng(0)
    data = tmp_path / "data.npz"

    def save(side: int = 8, images: int = 60, classes: int = 3) -> None:
        labels = np.arange(images) % classes
        pixels = random.integers(0, 255, (images, side, side, 1)).astype(np.uint8)
        np.savez(data, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)

    save()
    experiment = small(data=str(data), rounds=1, alpha=float("inf"))
    finish(experiment, tmp_path / "run")
    assert reopen(tmp_path / "run").start.model.round == 1
    for change in ({"side": 6}, {"images": 48}, {"classes": 5}):
        save(**change)
        with pytest.raises(ExperimentError, match=r"the data at .*data.npz is not what .* was started with"):
            reopen(tmp_path / "run")


# What a round does


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"method": method, "profile": p}
            for method in ("fedmpq", "aqfl", "fpq8")
            for p in ("paper", "best")
        ),
        *({"method": method} for method in ("fp32", "fedpaq", "uveqfed")),
        {"method": "fp32", "averaging": 0.8},
        {"method": "fp32", "statistics": "calibrated", "schedule": "steps"},
        {"profile": "paper", "statistics": "calibrated", "schedule": "cosine", "warmup": 1},
        {"profile": "best", "statistics": "averaged", "averaging": 0.0},
        *({"profile": "paper", "ablation": name} for name in ABLATIONS if name != "all"),
        {
            "profile": "paper",
            "step_rule": "least_error",
            "merge": "deltas",
            "deal": "uniform",
            "per_channel": True,
        },
        {"momentum_bits": 32, "pad": 1, "flip": True},
        *({"engine": name, "profile": p} for name in engine_names() for p in ("paper", "best")),
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_every_method_runs(tmp_path: Path, settings: dict[str, Any]) -> None:
    heard: list[Progress] = []
    experiment = small(**settings)
    prepared = prepare(experiment)
    results = run(prepared, tmp_path, 1, heard.append)
    assert [result.round for result in results] == [1, 2]
    quantized = experiment.activation_bits is not None
    for result in results:
        check_result(result, prepared, quantized, calibrating(result, experiment))
    model = load_checkpoint(tmp_path).model
    assert model.round == 2
    assert any(model.weights[n].tobytes() != t.tobytes() for n, t in prepared.start.model.weights.items())
    # 0 of 3, 1, 2, 3 of 3, and the result; twice.
    assert [(p.round, p.done, p.result is not None) for p in heard] == [
        (number, done, done == 3 and last)
        for number in (1, 2)
        for done, last in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1))
    ]
    first, *rounds = strict_lines(tmp_path)
    assert make_experiment({k: v for k, v in first.items() if k != "type"}) == experiment
    assert [line["accuracy"] for line in rounds] == [shares(result).accuracy for result in results]


def shares(result: RoundResult) -> Accuracies:
    assert result.accuracies is not None
    return result.accuracies


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_only_some_rounds_are_evaluated_and_the_last_always(tmp_path: Path) -> None:
    every = run(prepare(small(rounds=5)), tmp_path / "every", 1, silent)
    some = run(prepare(small(rounds=5, evaluate_every=2)), tmp_path / "some", 1, silent)
    assert [result.accuracies for result in some] == [
        None if result.round in (1, 3) else result.accuracies for result in every
    ]
    assert read_log(tmp_path / "some") == some


def calibrating(result: RoundResult, experiment: Experiment) -> int:
    """Clients that measure statistics after a round: its own, and all after the last."""
    if not experiment.calibrates:
        return 0
    return experiment.clients if result.round == experiment.rounds else len(result.clients)


def check_result(result: RoundResult, prepared: Prepared, quantized: bool, measuring: int) -> None:
    measured = shares(result)
    sizes = prepared.start.graph.layer_sizes
    side = sum(4 * tensor.size for tensor in prepared.start.model.side.values())
    assert list(measured.deployed) == (["2", "4", "8"] if quantized else [])
    for share in (measured.accuracy, measured.mean_deployed, *measured.deployed.values()):
        # Means over clients of shares of 40 images.
        assert 0 <= share <= 1
        assert share * 160 == pytest.approx(round(share * 160))
    assert len(result.clients) == 3
    assert list(result.clients) == sorted(set(result.clients))
    assert np.isfinite(result.loss)
    assert result.loss > 0
    assert len(result.bit_widths) == len(sizes)
    assert result.seconds > 0
    statistics = statistics_bytes(prepared)
    # A calibration sends the model once more, and brings back the statistics alone.
    sent, returned = 3 + measuring, measuring * statistics
    full = 4 * sum(sizes) + side
    if quantized:
        # Side tensors go in half precision, or in single where half would not do.
        assert 3 * side / 2 + returned / 2 < result.bytes_up
        assert result.bytes_up <= result.bytes_down * 3 / sent + 3 * side / 2 + returned + sum(sizes)
        assert sent * side / 2 < result.bytes_down < sent * full
        assert all(1 <= bits <= 8 for bits in result.bit_widths)
        assert measured.mean_deployed == pytest.approx(
            (measured.deployed["2"] + 2 * measured.deployed["4"] + measured.deployed["8"]) / 4
        )
    else:
        assert result.bytes_down == sent * full
        # Messages are framed, some bytes for each tensor.
        assert result.bytes_up <= 3 * full + 1.5 * returned
        assert measured.mean_deployed == measured.accuracy


@pytest.mark.usefixtures("in_process")
def test_what_is_sent_fits_the_budgets(tmp_path: Path) -> None:
    """Planes and steps of a round, counted in bytes."""
    prepared = prepare(small(participation=1.0, rounds=1, statistics="averaged"))
    (result,) = run(prepared, tmp_path, 1, silent)
    sizes = prepared.start.graph.layer_sizes
    steps, padding = 4 * len(sizes), 8 * len(sizes)
    bits = sum(prepared.experiment.budgets) * sum(sizes)
    side = prepared.start.model.side
    spent = result.bytes_down - 4 * (payload_bytes({}, rounded_side(side, 16)) + steps)
    framing = 64 + 16 * (len(sizes) + len(side))
    assert bits / 8 - 4 * max(sizes) / 8 < spent <= bits / 8 + 4 * (padding + framing)


@pytest.mark.usefixtures("in_process")
def test_fpq8_ignores_the_budgets_on_the_wire(tmp_path: Path) -> None:
    prepared = prepare(small(method="fpq8", rounds=1, statistics="averaged"))
    (result,) = run(prepared, tmp_path, 1, silent)
    assert result.bit_widths == (8,) * len(prepared.start.graph.layers)
    # Three clients' bytes, coded by their entropy.
    assert min(result.bytes_up, result.bytes_down) > 2.8 * sum(prepared.start.graph.layer_sizes)


class CountingPool(InProcessPool):
    """Notes who is asked for what, and the bytes down and up."""

    trained: ClassVar[list[tuple[list[int], int, int]]] = []
    calibrated: ClassVar[list[tuple[list[int], int, int]]] = []

    def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
        sent = list(assignments)
        found = list(super().train(sent))
        self.trained.append(_counted(self.graph, sent, found))
        yield from found

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        sent = list(assignments)
        found = super().calibrate(sent)
        self.calibrated.append(_counted(self.graph, sent, found))
        return found


def _counted(
    graph: Graph, sent: Sequence[Sent], found: Sequence[Returned] | Sequence[Calibration]
) -> tuple[list[int], int, int]:
    down, up = (sum(round_parts.counted_bytes(graph, one) for one in some) for some in (sent, found))
    return [one.client for one in sent], down, up


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"method": "fp32", "statistics": "calibrated", "averaging": 0.8}])
def test_a_rounds_clients_calibrate_it_and_all_of_them_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Rounds that are not evaluated are not calibrated; the bytes of a calibration are its round's."""
    monkeypatch.setattr(CountingPool, "trained", [])
    monkeypatch.setattr(CountingPool, "calibrated", [])
    monkeypatch.setattr(simulation, "WorkerPool", CountingPool)
    prepared = prepare(small(rounds=5, evaluate_every=2, participation=0.5, **settings))
    results = run(prepared, tmp_path, 1, silent)
    second, fourth, last = CountingPool.calibrated
    assert [len(result.clients) for result in results] == [2] * 5
    assert [asked for asked, _, _ in CountingPool.trained] == [list(result.clients) for result in results]
    assert [asked for asked, _, _ in (second, fourth, last)] == [
        list(results[1].clients),
        list(results[3].clients),
        [0, 1, 2, 3],
    ]
    extra = [([], 0, 0), second, ([], 0, 0), fourth, last]
    for result, training, calibration in zip(results, CountingPool.trained, extra, strict=True):
        assert result.bytes_down == training[1] + calibration[1]
        assert result.bytes_up == training[2] + calibration[2]
    # Half of the clients against all of them: the model goes to each, its statistics come back.
    whole = statistics_bytes(prepared)
    for asked, down, up in (second, fourth, last):
        assert len(asked) * whole / 2 <= up <= 1.5 * len(asked) * whole
        assert down > 5 * up
    if settings:
        assert last[1] == 2 * second[1]
        # A number takes the more bytes the larger it is, and zero none.
        assert last[2] == pytest.approx(2 * second[2], abs=8)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["fedmpq", "fp32"])
def test_without_batch_norm_there_is_nothing_to_calibrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def build(classes: int, channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, classes))

    monkeypatch.setitem(zoo._ZOO, "plain", build)
    shared = {"model": "plain", "method": method, "rounds": 1}
    (calibrated,) = finish(small(statistics="calibrated", **shared), tmp_path / "calibrated")
    (averaged,) = finish(small(statistics="averaged", **shared), tmp_path / "averaged")
    assert without_time([calibrated]) == without_time([averaged])


def statistics_bytes(prepared: Prepared) -> int:
    """Means and variances of the model's BatchNorms in single precision."""
    names = statistics_names(prepared.start.graph)
    return sum(4 * prepared.start.model.side[name].size for name in names)


def test_the_loss_does_not_depend_on_who_is_ready_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of numbers as unlike as these differ by their order."""

    class Pool(InProcessPool):
        backwards = False

        def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
            sent = list(assignments)
            for update in super().train(sent[::-1] if self.backwards else sent):
                assert isinstance(update, Update)
                yield replace(update, loss=1e16 if update.client == 0 else 1.0)

    monkeypatch.setattr(simulation, "WorkerPool", Pool)
    losses = set()
    for backwards in (False, True):
        monkeypatch.setattr(Pool, "backwards", backwards)
        (result,) = finish(small(rounds=1, participation=1.0), tmp_path)
        losses.add(result.loss)
    assert len(losses) == 1


def test_devices_of_one_budget_are_averaged_and_others_run_w() -> None:
    clients = [ClientRecord(n, budget, 5) for n, budget in enumerate((2.0, 4.0, 4.0, 2.5))]
    made: list[Probe] = [FullProbe({}, {}), IntegerProbe({}, {}, (1,)), IntegerProbe({}, {}, (0, 2))]
    by_budget, mean = simulation._deployed(made, [0.9, 0.5, 0.3], clients)
    assert by_budget == pytest.approx({"2": 0.3, "2.5": 0.9, "4": 0.4})
    assert mean == pytest.approx((0.3 + 0.5 + 0.3 + 0.9) / 4)


def test_each_assignment_is_evaluated_once() -> None:
    prepared = prepare(small(method="aqfl"))
    first, *others = probes(prepared.start)
    assert isinstance(first, FullProbe)
    assert first.weights is prepared.start.model.weights
    assert [probe.clients for probe in others] == [(0,), (1, 2), (3,)]
    assert all(isinstance(probe, IntegerProbe) for probe in others)


def test_clients_share_the_data_and_all_of_it() -> None:
    prepared = prepare(small())
    everyone = np.concatenate(prepared.parts)
    assert sorted(everyone) == list(range(80))
    assert [client.samples for client in prepared.start.model.clients] == [
        len(part) for part in prepared.parts
    ]
    assert [client.budget for client in prepared.start.model.clients] == SMALL["budgets"]
    assert average_bits(prepared.start.model.bit_widths, prepared.start.graph.layer_sizes) >= 1


def test_too_many_clients_for_the_data_is_said() -> None:
    with pytest.raises(PartitionError, match="100 clients"):
        prepare(small(budgets=[4] * 100))


def test_a_tensor_that_is_not_finite_names_the_learning_rate() -> None:
    require_finite({"bn.weight": np.ones(3, np.float32)}, TrainingPlan())
    with pytest.raises(TrainingError, match=r"bn.weight is not finite .* learning rate \(now 0.1\)"):
        require_finite({"bn.weight": np.array([1, np.inf], np.float32)}, TrainingPlan())


def test_a_checkpoint_is_there_before_the_first_round(tmp_path: Path) -> None:
    class Stopped:
        def __init__(self, *_: object) -> None:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WorkerPool", Stopped)
        with pytest.raises(Crash):
            finish(small(), tmp_path / "run")
    assert (tmp_path / "run" / FILE_NAME).exists()
    assert reopen(tmp_path / "run").start.model.round == 0
