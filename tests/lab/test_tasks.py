"""Simulations of other tasks than classification, from the data to the history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpq
from fedmpq.data.dataset import DataError
from fedmpq.lab import simulation
from fedmpq.lab.experiment import ExperimentError, make_experiment
from fedmpq.lab.report import Summary, plot_run, round_line, summary_table
from fedmpq.lab.round_log import RoundResult, read_log
from fedmpq.lab.run import load_run
from fedmpq.lab.simulation import Progress, prepare, reopen, run
from fedmpq.model.task import Task
from tests.in_process import InProcessPool
from tests.lab import networks

SMALL: dict[str, Any] = {
    "budgets": [2, 8],
    "participation": 1.0,
    "rounds": 6,
    "epochs": 4,
    "batch_size": 16,
    "alpha": float("inf"),
    "learning_rate": 0.5,
    "code_learning_rate": 0.5,
    "data_range": "boards",
}
METRIC = {"multi_label": "f1", "regression": "r2", "reconstruction": "r2"}
OTHERS = {
    "multi_label": {"label_accuracy", "auroc"},
    "regression": {"mae", "rmse"},
    "reconstruction": {"mse", "auroc"},
}


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)


def archive(folder: Path, task: Task) -> Path:
    """8 features made of 3 hidden numbers; anomalies are made otherwise."""
    random = np.random.default_rng(0)
    mixing = random.normal(size=(3, 8))
    hidden, fresh = random.normal(size=(320, 3)), random.normal(size=(64, 3))
    values, answers = np.tanh(hidden @ mixing), hidden[:, :2]
    path = folder / f"{task}.npz"
    if task == "reconstruction":
        odd = np.tanh(fresh @ random.normal(size=(3, 8)))
        marks = np.r_[np.zeros(64, np.int64), np.ones(64, np.int64)]
        np.savez(path, samples=values, samples_test=np.r_[np.tanh(fresh @ mixing), odd], labels_test=marks)
    else:
        targets = (answers > 0) if task == "multi_label" else answers.astype(np.float32)
        np.savez(path, samples=values, targets=targets, class_names=["left", "right"])
    return path


def finish(folder: Path, task: Task, **changes: Any) -> list[RoundResult]:
    model = "autoencoder" if task == "reconstruction" else "dense"
    settings = {**SMALL, "model": f"tests.lab.networks:{model}", "task": task, **changes}
    experiment = make_experiment({"data": str(archive(folder, task)), **settings})
    return run(prepare(experiment), folder / "run", 1, silent)


def silent(_: Progress) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rate"), [("fedmpq", 0.5), ("fp32", 0.05)])
@pytest.mark.parametrize("task", METRIC)
def test_a_task_is_learnt(tmp_path: Path, task: Task, method: str, rate: float) -> None:
    first, *_, last = results = finish(tmp_path, task, method=method, learning_rate=rate)
    assert first.accuracies is not None
    assert last.accuracies is not None
    assert {result.metric for result in results} == {METRIC[task]}
    assert last.accuracies.others.keys() == OTHERS[task]
    assert last.accuracies.mean_deployed > max(0.4, first.accuracies.mean_deployed)
    if task != "regression":
        assert last.accuracies.others["auroc"] > 0.85
    assert last.loss < first.loss


@pytest.mark.slow
def test_a_runs_history_names_its_metric(tmp_path: Path) -> None:
    results = finish(tmp_path, "reconstruction", rounds=2, evaluate_every=2)
    assert read_log(tmp_path / "run") == results
    history = load_run(tmp_path / "run").history
    assert {"r2", "r2_2_bit", "r2_8_bit", "mean_deployed", "mse", "auroc"} <= set(history.columns)
    assert not any("accuracy" in name for name in history.columns)
    assert (history["r2"][0], history["auroc"][0]) == (None, None)
    assert results[-1].accuracies is not None
    assert history["auroc"][1] == results[-1].accuracies.others["auroc"]
    line = json.loads(json.dumps(history.rounds[-1].to_dict()))
    assert (line["metric"], line["r2"]) == ("r2", results[-1].accuracies.accuracy)
    assert "R²  W 0." in round_line(results[-1], 2)
    table = summary_table({"fedmpq": [Summary.of(results, 1)]}, 1)
    assert table.title == "Test R², last round"
    plot_run(history.rounds, ["a"], "title", tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_task_goes_on_where_it_was_left(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (halves := tmp_path / "halves").mkdir()
    finish(whole, "regression", rounds=2)
    finish(halves, "regression", rounds=1)
    # The schedule of the learning rates is that of the rounds first asked for.
    resumed = run(reopen(halves / "run", 2), halves / "run", 1, silent)
    again = run(reopen(halves / "run", 2), halves / "run", 1, silent)
    assert len(resumed) == 2
    assert again == resumed
    assert load_run(halves / "run").graph == load_run(whole / "run").graph
    assert load_run(whole / "run").graph.task == "regression"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"task = 'regresion' is none of .* did you mean 'regression'"):
        make_experiment({"data": "digits", "task": "regresion"})
    path = archive(tmp_path, "regression")
    with pytest.raises(DataError, match="2 targets each: classification needs"):
        prepare(make_experiment({**SMALL, "data": str(path)}))
    with pytest.raises(DataError, match="multi_label needs 0 or 1"):
        prepare(make_experiment({**SMALL, "data": str(path), "task": "multi_label"}))


@pytest.mark.slow
def test_from_python_with_arrays_alone() -> None:
    """What is normal without labels, and test samples of both kinds; the network is a module."""
    random = np.random.default_rng(0)
    mixing = random.normal(size=(3, 8))
    normal, fresh = (np.tanh(random.normal(size=(count, 3)) @ mixing) for count in (320, 64))
    odd = np.tanh(random.normal(size=(64, 3)) @ random.normal(size=(3, 8)))
    test = (np.r_[fresh, odd].astype(np.float32), np.r_[np.zeros(64, np.int64), np.ones(64, np.int64)])
    settings = {name: value for name, value in SMALL.items() if name != "budgets"}
    made = fedmpq.simulate(
        networks.autoencoder(8, 8),
        (normal.astype(np.float32), test),
        task="reconstruction",
        budgets=SMALL["budgets"],
        progress=False,
        **settings,
    )
    assert made.history["auroc"][-1] > 0.85
    model = made.deployed(budget=8)
    codes = np.random.default_rng(1).integers(0, 256, (5, 1, 1, 8)).astype(np.uint8)
    assert model.predict(codes).shape == (5, 8)
    assert model.anomaly_scores(codes).shape == (5,)


def test_a_trained_network_of_values_is_quantized() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    codes = np.random.default_rng(1).integers(0, 256, (80, 1, 1, 8)).astype(np.uint8)
    model = fedmpq.quantize(module, 8, codes, task="regression")
    exact = module(torch.from_numpy(codes.reshape(80, 8, 1, 1)).float() / 255).detach().numpy()
    assert model.score(codes, exact).value > 0.98
