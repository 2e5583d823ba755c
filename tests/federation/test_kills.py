"""SIGKILL at random moments: every run ends, and ends with the model of an undisturbed one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.federation.federation import Arrays, Federation, assert_same
from tools.programs import PATIENCE, Program, wait_for_port
from tools.tcp_proxy import Proxy

BUDGETS = (2, 8)
SETTINGS = {"rounds": 6}
MANY_ROUNDS = {"rounds": 10, "epochs": 2}
KILLS = 10


def simulated(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, int]) -> Arrays:
    """What `fedmpq simulate` ends with; test_equals_simulation shows that a quiet federation does too."""
    with Federation(tmp_path_factory.mktemp("quiet"), BUDGETS, settings) as federation:
        return federation.simulated()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return simulated(tmp_path_factory, SETTINGS)


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return simulated(tmp_path_factory, MANY_ROUNDS)


def wait(seconds: float, server: Program, rounds: int) -> None:
    """So long, but only until so many rounds are done: a fast machine must not end the run between kills."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and f"round merged run=parts round={rounds} " not in server.text():
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("seed", "database"),
    [(1, "sqlite"), (2, "sqlite"), (3, "sqlite"), (4, "postgresql")],
    indirect=["database"],
)
def test_the_server_is_killed(
    seed: int, database: str | None, tmp_path: Path, undisturbed_long: Arrays
) -> None:
    """Ten times in each run, after a random part of a second: in start-up, rounds, merges, commits."""
    print(f"seed {seed}")
    moments = random.Random(seed)
    with Federation(tmp_path, BUDGETS, MANY_ROUNDS, database) as federation:
        server = federation.start_server()
        federation.start_boards()
        for kill in range(1, KILLS + 1):
            wait(moments.uniform(0.0, 1.0), server, rounds=kill)
            assert server.running, f"the run ended before kill {kill}: {server.last_words()}"
            server.kill()
            time.sleep(moments.uniform(0.0, 0.2))
            server.restart()
            if moments.random() < 0.7:
                wait_for_port(federation.port, server)
        assert_same(federation.finish(), undisturbed_long)
        assert server.text().count("listening on") >= KILLS / 2


def test_a_board_is_killed(tmp_path: Path, undisturbed: Arrays) -> None:
    """In training or transfer, at random; and once surely in the middle of an upload."""
    moments = random.Random(4)
    with Federation(tmp_path, BUDGETS, SETTINGS) as federation:
        server = federation.start_server()
        with Proxy(federation.port, rate=60_000) as slow:
            federation.start_board(0)
            board = federation.start_board(1, slow.port)
            before = slow.up
            while slow.up - before < 12_000:
                time.sleep(0.005)
            board.kill()
            for kill in range(1, 5):
                board.restart()
                wait(moments.uniform(0.5, 2.5), server, rounds=kill)
                board.kill()
            slow.rate = None
            board.restart()
            assert_same(federation.finish(), undisturbed)


def test_both_are_killed_while_statistics_are_measured(tmp_path: Path, undisturbed: Arrays) -> None:
    """The board after its download, before its upload or after it; the server with none or some answers."""
    with Federation(tmp_path, BUDGETS, SETTINGS) as federation:
        server = federation.start_server()
        federation.start_boards()
        board = federation.boards[0]
        for number in range(1, SETTINGS["rounds"] + 1):
            wait_for_text(board, f"round {number} of {SETTINGS['rounds']}, statistics")
            for killed in ((server, board), (board,), (server,))[number % 3]:
                killed.kill()
                killed.restart()
        assert_same(federation.finish(), undisturbed)
        assert "calibration goes on" in server.text(), "a server came back to an open calibration"


def wait_for_text(program: Program, text: str) -> None:
    until = time.monotonic() + PATIENCE
    while text not in program.text():
        assert time.monotonic() < until, f"{text!r} was not said: {program.last_words()}"
        time.sleep(0.005)


def test_connections_are_cut_and_stall(tmp_path: Path, undisturbed: Arrays) -> None:
    with Federation(tmp_path, BUDGETS, SETTINGS) as federation:
        federation.start_server()
        with Proxy(federation.port, cut_every=40_000) as proxy:
            for number in range(len(BUDGETS)):
                federation.start_board(number, proxy.port, "--stall", "1", "--keepalive", "10")
            time.sleep(3)
            proxy.stall(True)
            time.sleep(2)
            proxy.stall(False)
            assert_same(federation.finish(), undisturbed)
            assert proxy.cuts >= 4
