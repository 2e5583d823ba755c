"""One board in four sends something else than it has trained, and the model is as good as the other three
make it. The server and all boards are processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import fedmpq
from fedmpq.data.open_source import load
from tests.federation.federation import Federation
from tests.federation.hostile_board import LIES
from tools.programs import Program

BUDGETS = (4, 6, 8, 8)
SETTINGS = {"rounds": 6, "epochs": 2, "evaluate_every": 6, "max_samples": 10_000_000}
EVEN = ("--alpha", "100")


def accuracy(federation: Federation) -> float:
    """Of what the three honest boards run."""
    test = load(str(federation.folder / "parts" / "test.npz"), "test")
    run = fedmpq.load_run(federation.state)
    found = [run.deployed(client=Federation.name(number)) for number in range(3)]
    return float(np.mean([model.accuracy(test.images, test.labels) for model in found]))


def final_accuracy(folder: Path, lie: str) -> float:
    with Federation(folder, BUDGETS, SETTINGS, split=EVEN) as federation:
        federation.start_server()
        for number in range(3):
            federation.start_board(number)
        start_hostile_board(federation, 3, lie)
        federation.finish()
        return accuracy(federation)


def start_hostile_board(federation: Federation, number: int, lie: str) -> None:
    history = federation.folder / "histories" / f"board-{number}.jsonl"
    words = [sys.executable, "-m", "tests.federation.hostile_board", lie, str(history)]
    log = federation.folder / f"board-{number}.log"
    federation.boards[number] = Program([*words, *federation.board_words(number)], log)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_one_hostile_board_in_four_does_no_harm(tmp_path: Path, lie: str) -> None:
    found = final_accuracy(tmp_path, lie)
    assert found > 0.93, f"{found:.3f} with {lie}"
