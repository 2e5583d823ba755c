"""Runs of other tasks than classification: their settings, their data and their facts."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.exchange.messages import Evaluation
from fedmpq.method.evaluation import mean_others, reported_accuracies
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.metrics import Score
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.round_facts import Measured, TooMuchWorse, accuracy_facts, checked_facts
from fedmpq.server.run_config import (
    ConfigError,
    RunConfig,
    images_of,
    load_calibration_data,
    load_test_data,
    make_config,
)
from fedmpq.server.status_report import console, runs_table, status_line, status_table
from fedmpq.server.stored_status import round_metrics

PLAIN: dict[str, Any] = {"name": "pump", "clients_per_round": 2, "image": [1, 1, 4], "data_range": "0..1"}


def config(task: str, **settings: Any) -> RunConfig:
    return make_config({**PLAIN, "task": task, **settings})


def archive(path: Path, **arrays: Any) -> str:
    values = np.random.default_rng(0).uniform(size=(6, 4)).astype(np.float32)
    np.savez(path, samples=values, **arrays)
    return str(path)


def test_a_reconstruction_needs_no_names() -> None:
    assert images_of(config("reconstruction"), None).class_names == ("normal",)
    with pytest.raises(ConfigError, match="give class_names or classes = N"):
        config("regression")
    with pytest.raises(ConfigError, match="task = 'anomaly' is none of classification, multi_label"):
        config("anomaly")


def test_test_data_have_targets(tmp_path: Path) -> None:
    path = archive(tmp_path / "test.npz", targets=np.arange(12).reshape(6, 2), class_names=["load", "wear"])
    made = config("regression", test_data=path)
    test = load_test_data(made)
    assert test is not None
    assert images_of(made, test).class_names == ("load", "wear")
    # The task is the run's, whatever the form that says no more than a shape.
    swapped = load_test_data(made, Form(1, 1, 4), ("wear", "load"))
    assert swapped is not None
    assert swapped.targets is not None
    assert swapped.targets[:, 0].tolist() == [1, 3, 5, 7, 9, 11]
    with pytest.raises(ConfigError, match="2 targets for each sample, the run names 3"):
        images_of(config("regression", test_data=path, classes=3), test)
    with pytest.raises(DataError, match="classification needs a class"):
        load_test_data(config("classification", test_data=path))


def test_anomalies_are_measured_and_not_calibrated_on(tmp_path: Path) -> None:
    path = archive(tmp_path / "both.npz", labels=np.arange(6) % 2)
    made = config("reconstruction", test_data=path, calibration_data=path)
    form = Form(1, 1, 4)
    test, calibration = load_test_data(made, form), load_calibration_data(made, form)
    assert test is not None
    assert calibration is not None
    assert (len(test), len(calibration)) == (6, 3)


def model() -> GlobalModel:
    clients = tuple(ClientRecord(number, budget, 10) for number, budget in enumerate((2.0, 4.0, 4.0)))
    return GlobalModel(1, {}, {}, (4,), clients)


def test_facts_name_the_metric() -> None:
    scores = {number: Score(value, {"mae": value / 2}) for number, value in enumerate((0.5, 0.25, 0.75))}
    values = {client: score.value for client, score in scores.items()}
    measured = Measured(values, "server", others=mean_others(scores))
    facts = accuracy_facts(model(), measured, "regression")
    assert (facts["metric"], facts["others"]) == ("r2", {"mae": 0.25})
    assert facts["deployed_accuracy"] == {"2": 0.5, "4": 0.5}
    assert not {"metric", "others"} & accuracy_facts(model(), measured, "classification").keys()
    with pytest.raises(TooMuchWorse, match=r"the R² fell from 0\.9000 to 0\.5000"):
        checked_facts(model(), measured, "regression", 0.9, 0.3)


def test_reports_of_boards_are_scores() -> None:
    told = {0: Evaluation(10, 5), 1: Evaluation(10, 0, -0.5), 2: Evaluation(0, 0), 3: None}
    assert reported_accuracies(told) == {0: 0.5, 1: -0.5}


def test_people_read_the_metric() -> None:
    stored = {
        "round": 1,
        "metric": "r2",
        "others": {"auroc": 0.97},
        "deployed_accuracy": {"4": 0.8125},
        "mean_deployed_accuracy": 0.8125,
    }
    status = pb.ServerStatus(run=pb.RunStatus(name="pump", metrics=round_metrics(stored)))
    status.clients.add(name="one", client=0, accuracy=0.8125)
    assert "R² 0.812, up" in status_line(status)
    text = printed(status_table(status))
    assert "0.812; 4 bits 0.812; auroc 0.97" in text
    assert "accuracy" not in text
    assert "R² 0.812" in printed(runs_table([status.run]))


def printed(table: Any) -> str:
    stream = StringIO()
    console(stream).print(table)
    return stream.getvalue()
