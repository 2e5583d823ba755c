"""Boards that are lost in the middle of a round: the run goes on without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.cli.main import main
from tests.federation.federation import Federation
from tests.full_disk import fill, small_disk
from tests.waiting import until

__all__ = ["small_disk"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "revoked"),
    [({"away_seconds": 2}, True), ({"away_seconds": 2, "deadline_seconds": 4}, False)],
    ids=["revoked", "away"],
)
def test_a_run_goes_on_without_a_board_that_was_lost(
    tmp_path: Path, settings: dict[str, Any], revoked: bool
) -> None:
    """With a quorum of all and no spare board."""
    with Federation(tmp_path, [2, 4, 8], {"rounds": 2, **settings}) as federation:
        federation.start_server()
        federation.start_boards()
        lost = federation.boards.pop(2)
        lost.wait_for("round 1 of 2, training")
        lost.kill()
        if revoked:
            assert main(["server", "revoke", "board-2", "--state", str(federation.state)]) == 0
        federation.finish()
        history = federation.history()
        assert [row["clients"] for row in history] == [2, 2]
        assert [row["late"] for row in history] == [1, 0]


def test_a_board_that_cannot_take_part_says_so_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"rounds": 2, "away_seconds": 2, "deadline_seconds": 0}
    with Federation(tmp_path, [4, 8], settings) as federation:
        file = tmp_path / "parts" / "client-1.npz"
        with np.load(file) as arrays:
            changed = dict(arrays)
        changed["class_names"] = np.array([f"zebra {name}" for name in changed["class_names"]])
        np.savez(file, **changed)
        federation.start_server()
        federation.start_boards()
        told = until(lambda: declined(federation, capsys))
        assert "class 'zebra 0' is none of the model's 10 classes" in told
        federation.finish()
        assert [row["clients"] for row in federation.history()] == [1, 1]


def declined(federation: Federation, capsys: pytest.CaptureFixture[str]) -> str:
    """Why a board has declined, as the operator sees it; empty: none has."""
    capsys.readouterr()
    main(["status", "--json", "--state", str(federation.state)])
    clients = json.loads(capsys.readouterr().out)["clients"]
    return str(next((one["reason"] for one in clients if one["state"] == "declined"), ""))


def test_a_full_disk_costs_a_board_time_and_nothing_else(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Federation(tmp_path, [4], {"rounds": 2, "epochs": 3}) as federation:
        federation.start_server()
        filler = small_disk / "filler"
        fill(filler)
        board = federation.start_board(0, None, "--state", str(small_disk / "state"))
        board.wait_for(f"no space is left in {small_disk / 'state'}")
        filler.unlink()
        board.wait_for("round 1 of 2, training")
        fill(filler)
        board.wait_for("cannot be done now: no space is left")
        reason = until(lambda: declined(federation, capsys))
        assert f"no space is left in {small_disk / 'state'}" in reason
        assert board.running
        filler.unlink()
        federation.finish()
        assert [row["clients"] for row in federation.history()] == [1, 1]


def test_a_deadline_can_be_given_to_a_run_that_hangs(tmp_path: Path) -> None:
    with Federation(tmp_path, [4, 8], {"rounds": 2, "deadline_seconds": 0}) as federation:
        server = federation.start_server()
        federation.start_boards()
        lost = federation.boards.pop(1)
        lost.wait_for("round 1 of 2, training")
        lost.kill()
        federation.boards[0].wait_for("round 1: update of")
        assert runs(federation, "set", "parts", "seed=3") == 2
        assert runs(federation, "set", "parts", "deadline_seconds=3", "away_seconds=2") == 0
        federation.finish()
        assert [row["clients"] for row in federation.history()] == [1, 1]
        server.restart()
        assert server.wait() == 0, "the run.toml it was started with is still good"
        assert "deadline_seconds: 3.0 holds, not 0.0" in server.text()


def runs(federation: Federation, *words: str) -> int:
    return main(["runs", *words, "--state", str(federation.state)])
