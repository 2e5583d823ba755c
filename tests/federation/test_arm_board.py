"""An emulated ARM board in a federation over mutual TLS: the same model as without it, to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.arm.conftest import board, site  # noqa: F401
from tests.federation.federation import Arrays, Federation, assert_same
from tools.arm_board import CPUS, Board
from tools.programs import Program

BUDGETS = (2, 4, 8)
SETTINGS = {"rounds": 2, "batch_size": 32}
SPLIT = ("--train-limit", "240")


@pytest.fixture(scope="module")
def all_native(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    with Federation(tmp_path_factory.mktemp("native"), BUDGETS, SETTINGS, split=SPLIT) as federation:
        federation.start_server()
        federation.start_boards()
        return federation.finish()


@pytest.mark.parametrize("cpu", CPUS)
def test_a_board_joins(tmp_path: Path, all_native: Arrays, board: Board, site: Path, cpu: str) -> None:  # noqa: F811
    with Federation(tmp_path, BUDGETS, SETTINGS, split=SPLIT) as federation:
        federation.start_server()
        federation.start_board(0)
        federation.start_board(2)
        federation.boards[1] = Program(
            [board.launcher(cpu), "-m", "fedmpq.cli", *federation.board_words(1)],
            tmp_path / "arm.log",
            {"PYTHONPATH": f"{site}{os.pathsep}{Path(__file__).parents[2]}"},
        )
        assert_same(federation.finish(patience=240), all_native)
        assert "neon" in federation.boards[1].text()
