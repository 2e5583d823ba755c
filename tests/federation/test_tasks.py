"""Federations of other tasks than classification, over the real server: equal to a simulation to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.cli.main import main
from tests.federation.federation import Federation, assert_same
from tests.federation.test_equals_simulation import assert_same_history

pytestmark = pytest.mark.slow


def archive(path: Path, task: str) -> Path:
    random = np.random.default_rng(3)
    hidden = random.normal(size=(160, 3))
    values = (hidden @ random.normal(size=(3, 8))).astype(np.float32)
    answers: dict[str, Any] = {"targets": hidden[:, :2], "class_names": ["left", "right"]}
    np.savez(path, samples=values, **(answers if task == "regression" else {}))
    return path


def federation(folder: Path, task: str, model: str, **settings: Any) -> Federation:
    data = archive(folder / "data.npz", task)
    split = ("--data-range", "boards", "--task", task)
    common = {"rounds": 2, "min_clients": 2, "data_range": "boards", "task": task}
    settings = {**common, "model": f"tests.lab.networks:{model}", **settings}
    return Federation(folder, (3, 8), settings, data=str(data), split=split)


def test_a_regression_trains_as_in_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with federation(tmp_path, "regression", "dense", profile="best") as made:
        made.start_server()
        made.start_boards()
        assert_same(made.finish(), made.simulated())
        assert_same_history(tmp_path / "state", tmp_path / "simulated")
        history = made.history()
        assert {"r2_3_bit", "r2_8_bit", "mae", "rmse"} <= set(history.columns)
        assert made.stored().run.class_names == ("left", "right")
    capsys.readouterr()
    # It shows what the folder holds, and says by its status that no server runs.
    assert main(["status", "--state", str(tmp_path / "state"), "--json"]) == 2
    metrics = json.loads(capsys.readouterr().out)["run"]["metrics"]
    assert metrics["metric"] == "r2"
    assert metrics["mean_deployed_accuracy"] == history["mean_deployed"][-1]
    assert metrics["others"] == {"mae": history["mae"][-1], "rmse": history["rmse"][-1]}
    assert main(["status", "--state", str(tmp_path / "state")]) == 2
    assert f"R²          {history['mean_deployed'][-1]:.3f}; 3 bits" in capsys.readouterr().out
    assert "accuracy" not in (tmp_path / "board-0.log").read_text()


def test_boards_measure_their_own_reconstructions(tmp_path: Path) -> None:
    """Without test data, labels or names of anything."""
    nothing = {"test_data": None, "class_names": None}
    with federation(tmp_path, "reconstruction", "autoencoder", profile="paper", **nothing) as made:
        made.start_server()
        made.start_boards()
        assert_same(made.finish(), made.simulated())
        history = made.history()
    assert all(-1 <= row["mean_deployed"] <= 1 for row in history)
    assert history.rounds[-1].measured_by == "boards"
    assert history.rounds[-1].metric == "r2"
    assert "the model as received has R²" in (tmp_path / "board-0.log").read_text()
