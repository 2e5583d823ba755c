"""The virtual clock: times as the formula has them, the same for one seed, and rounds that last as long as
their slowest board."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.lab import report, simulation
from fedmpq.lab.boards import Board, Boards, BoardsError, VirtualClock, boards_text, micros, seconds
from fedmpq.lab.experiment import ExperimentError
from fedmpq.lab.round_log import RoundResult, read_log
from fedmpq.lab.run import load_run
from fedmpq.lab.simulation import Progress, prepare, reopen, run
from fedmpq.model.randomness import Draws, Purpose
from tests.in_process import InProcessPool
from tests.lab.small_experiment import silent, small

NUMBERS = st.floats(0, 1e6, allow_nan=False)
RATES = st.floats(1e-3, 1e9)
BOARD = st.builds(Board, NUMBERS, RATES, RATES, NUMBERS, st.floats(0, 10))


@given(BOARD, st.floats(1, 100), st.dictionaries(st.integers(0, 50), BOARD, max_size=3))
def test_boards_survive_their_text(usual: Board, spread: float, own: dict[int, Board]) -> None:
    boards = Boards(usual, spread, own)
    assert Boards.from_text(boards.text()) == boards
    assert boards_text(boards.text()) == boards.text()


@given(BOARD, st.integers(0, 2**32 - 1), st.integers(0, 99), st.integers(1, 99), st.floats(1, 100))
def test_times_are_those_of_the_formula(
    board: Board, seed: int, client: int, number: int, spread: float
) -> None:
    clock = VirtualClock(Boards(board, spread), seed)
    slow = 1 + (spread - 1) * float(Draws(seed, client, 0).uniform(1, Purpose.SPEED)[0])
    drawn = float(Draws(seed, client, number).uniform(1, Purpose.SPEED, step=1)[0])
    computing = 300 * board.seconds_per_sample * slow * (1 + board.jitter * drawn)
    down, up = 5000 * slow / board.down, 700 * slow / board.up
    found = seconds(clock.trained(client, number, 300, 5000)), seconds(clock.sent(client, 700))
    # Each of three parts, and of two, is rounded to a microsecond.
    assert math.isclose(found[0], board.latency + down + computing, rel_tol=1e-9, abs_tol=2e-6)
    assert math.isclose(found[1], board.latency + up, rel_tol=1e-9, abs_tol=2e-6)
    exact = clock.trained(client, number, 300, 5000)
    assert micros(seconds(exact)) == exact or exact > 2**51


def test_boards_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "boards.toml"
    file.write_text(
        "seconds_per_sample = 0.02\nspread = 10\n\n[[board]]\nclients = '1-3'\nup = 500.0\n\n"
        "[[board]]\nclients = [7]\nlatency = 1\n"
    )
    boards = Boards.from_text(boards_text(file))
    slow, far = Board(seconds_per_sample=0.02, up=500.0), Board(seconds_per_sample=0.02, latency=1)
    assert boards == Boards(Board(0.02), 10, {1: slow, 2: slow, 3: slow, 7: far})
    # What a file says of some clients is not spread any further, and the usual board is.
    assert boards.of(2, seed=0) == slow
    others = [boards.of(client, 0).seconds_per_sample for client in range(100, 200)]
    assert 0.02 <= min(others) < 0.04
    assert 0.18 < max(others) < 0.2
    assert boards.of(100, seed=1) != boards.of(100, seed=0) == boards.of(100, seed=0)
    # The experiment keeps what the file said when it began.
    experiment = small(boards=str(file))
    file.unlink()
    assert experiment.clock == VirtualClock(boards, 0)
    assert small(**experiment.to_dict()).boards == experiment.boards


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"speed": 3}, "boards has 'speed'; known are seconds_per_sample"),
        ({"up": 0}, "up = 0 is no number of 1e-09..1e"),
        ({"latency": -1.0}, "latency = -1.0 is no number"),
        ({"jitter": math.nan}, "jitter = nan is no number"),
        ({"spread": 0.5}, "spread = 0.5 is no number of 1"),
        ({"board": 3}, r"no list of tables; write \[\[board\]\]"),
        ({"board": [{"up": 3}]}, r"\[\[board\]\] has clients = None"),
        ({"board": [{"clients": "a-b"}]}, "a range such as '0-4'"),
        ({"board": [{"clients": [1]}, {"clients": [1]}]}, "client 1 is in two"),
        ({"board": [{"clients": [1], "speed": 3}]}, r"\[\[board\]\] has 'speed'"),
        ("no/such.toml", "cannot read no/such.toml"),
        (7, "boards = 7 is no TOML file"),
        ("{]", "is no model of boards"),
    ],
)
def test_what_is_no_model_of_boards(wrong: Any, words: str) -> None:
    with pytest.raises(BoardsError, match=words):
        boards_text(wrong)
    with pytest.raises(ExperimentError, match="boards: "):
        small(boards=wrong)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "boards.toml"
    for text, words in (("up = ", "is not valid TOML"), ("up = 0", r"boards.toml: up = 0 is no number")):
        file.write_text(text)
        with pytest.raises(BoardsError, match=words):
            boards_text(str(file))


SLOW = {"seconds_per_sample": 0.001, "jitter": 0.5, "board": [{"clients": [2], "up": 1000.0}]}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds with a clock, broken off after the first and resumed."""

    class Crash(Exception):
        pass

    def listener(progress: Progress) -> None:
        if progress.round == 2 and progress.done == 1:
            raise Crash

    folder = tmp_path_factory.mktemp("timed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WorkerPool", InProcessPool)
        with pytest.raises(Crash):
            run(prepare(small(boards=SLOW, rounds=3)), folder, 1, listener)
        run(reopen(folder), folder, 1, silent)
    return folder


def test_a_round_lasts_as_long_as_its_slowest_board(timed: Path) -> None:
    experiment = small(boards=SLOW, rounds=3)
    clock = experiment.clock
    assert clock is not None
    samples = [len(part) for part in prepare(experiment).parts]
    now = 0
    for result in read_log(timed):
        lasted = [
            clock.trained(part.client, result.round, samples[part.client], part.bytes_down)
            + clock.sent(part.client, part.bytes_up)
            for part in result.parts
        ]
        now += max(lasted)
        assert (result.virtual_seconds, result.virtual_time) == (max(lasted) / 1e6, now / 1e6)
        # It is the one with the slow line, if it is there.
        slowest = result.parts[lasted.index(max(lasted))].client
        assert slowest == 2 or 2 not in result.clients
    history = load_run(timed).history
    assert history["virtual_time"][-1] == now / 1e6
    assert history.rounds[0].to_dict()["virtual_time"] == read_log(timed)[0].virtual_time


def test_without_boards_there_is_no_clock() -> None:
    result = RoundResult(1, None, 1.0, 1, 1, (0,), (4,), 0.5)
    assert result.virtual_time is None
    assert "virtual_time" not in result.facts().row()
    assert "virtual" not in report.round_line(result, 1)
    assert small().clock is None


def test_the_clock_is_shown(timed: Path, tmp_path: Path) -> None:
    results = read_log(timed)
    assert f"virtual time {results[-1].virtual_time:.1f} s" in report.round_line(results[-1], 3)
    summary = report.Summary.of(results, 1)
    assert summary.virtual_time == results[-1].virtual_time
    table = report.summary_table({"timed": [summary]}, 1)
    assert [column.header for column in table.columns][-1] == "virtual time"
    assert next(reversed(list(table.columns[-1].cells))) == f"{summary.virtual_time:.1f} s"
    facts, layers = [each.facts() for each in results], [f"layer{n}" for n in range(7)]
    report.plot_run(facts, layers, "a run", tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    report.plot_comparison({"timed": [results, results]}, "two", tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 10_000


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.floats(-5, 60))
def test_the_picture_s_second_axis_goes_there_and_back(durations: list[float], at: float) -> None:
    times = [sum(durations[:n]) for n in range(len(durations) + 1)]
    numbers = [float(n) for n in range(len(times))]
    there = report._extended(at, numbers, times)
    assert math.isclose(report._extended(there, times, numbers), at, rel_tol=1e-6, abs_tol=1e-6)
    assert [float(report._extended(n, numbers, times)) for n in numbers] == pytest.approx(times)
