"""`fedmpq track`: what TensorBoard and MLflow read is what the history has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from fedmpq.cli.main import main
from fedmpq.cli.tracked_rounds import tracking
from fedmpq.lab.round_log import RoundResult
from fedmpq.method.history import RoundFacts
from fedmpq.method.tracking import TrackingError, open_tracker, scalars

Capture = pytest.CaptureFixture[str]


def facts(number: int, **changes: Any) -> RoundFacts:
    values: dict[str, Any] = {
        "round": number,
        "loss": 1.0 / number,
        "accuracy": None,
        "deployed": {"2": 0.5, "8": 0.75},
        "mean_deployed": 0.625,
        "measured_by": "test data",
        "bytes_up": 1000 * number,
        "bytes_down": 2000 * number,
        "bit_widths": (2, 4, 6),
        "seconds": 1.5,
    }
    return RoundFacts(**{**values, **changes})


def events(folder: Path) -> dict[tuple[str, int], float]:
    """By tag and step, read without TensorBoard: a record is length, checksum, event, checksum."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            for value in event.summary.value:
                assert (value.tag, event.step) not in found, "written twice"
                found[value.tag, event.step] = value.simple_value
            at += 12 + length + 4
    return found


def test_numbers_of_a_round_are_scalars() -> None:
    found = scalars(facts(4))
    assert found["loss"] == 0.25
    assert found["accuracy_2_bit"] == 0.5
    assert found["mean_bits"] == 4
    assert "round" not in found
    assert "accuracy" not in found, "it was not measured"


def test_tensorboard_has_each_round_once(tmp_path: Path) -> None:
    for until in (2, 3):
        tracker = open_tracker(f"tensorboard:{tmp_path}", "garden")
        for number in range(tracker.last + 1, until + 1):
            tracker.add(facts(number))
        tracker.close()
    found = events(tmp_path / "garden")
    assert {step for _, step in found} == {1, 2, 3}
    assert found["loss", 2] == pytest.approx(0.5)
    assert found["bytes_up", 3] == 3000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own, of the libraries that it uses
def test_mlflow_has_each_round_once(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for until in (1, 3):
        tracker = open_tracker(f"mlflow:{uri}", "garden")
        for number in range(tracker.last + 1, until + 1):
            tracker.add(facts(number))
        tracker.close()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fedmpq")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]


@pytest.mark.slow
def test_a_simulation_is_tracked_from_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    words = [
        "--data",
        "digits",
        "--model",
        "digits_cnn",
        "--rounds",
        "2",
        "--budgets",
        "4,8",
        "--workers",
        "1",
    ]
    live = ["--track", f"tensorboard:{tmp_path / 'live'}"]
    assert main(["simulate", *words, "--train-limit", "100", "--out", str(tmp_path / "run"), *live]) == 0
    capsys.readouterr()
    track = ["track", str(tmp_path / "run"), "--to", f"tensorboard:{tmp_path / 'logs'}"]
    assert main(track) == 0
    assert "run: rounds 1 to 2 written" in capsys.readouterr().out
    assert main(track) == 0
    assert capsys.readouterr().out == ""
    later = events(tmp_path / "logs" / "run")
    assert {step for _, step in later} == {1, 2}
    assert events(tmp_path / "live" / "run") == later
    again = ["simulate", *words, "--train-limit", "100", "--out", str(tmp_path / "run"), *live, "--overwrite"]
    assert main(again) == 2
    assert "has 2 rounds of an earlier run 'run'" in capsys.readouterr().err


def test_a_tracker_that_fails_costs_its_rounds_alone(tmp_path: Path) -> None:
    said: list[str] = []
    result = RoundResult(1, None, 0.5, 10, 20, (0,), (4,), 1.0)
    with tracking(f"tensorboard:{tmp_path / 'logs'}", tmp_path / "run", 0, said.append) as track:
        track(result)
        (tmp_path / "logs" / "run" / "fedmpq-tracked.json").unlink()
        (tmp_path / "logs" / "run" / "fedmpq-tracked.json").mkdir()
        track(replace(result, round=2))
        track(replace(result, round=3))
    (line,) = said
    assert line.endswith(f"fedmpq track {tmp_path / 'run'} --to tensorboard:{tmp_path / 'logs'}")


def test_targets_that_cannot_be_are_named(tmp_path: Path) -> None:
    for target in ("wandb:x", "tensorboard", "mlflow:"):
        with pytest.raises(TrackingError, match="write tensorboard:FOLDER or mlflow:URI"):
            open_tracker(target, "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fedmpq-tracked.json").write_text("{")
    with pytest.raises(TrackingError, match="delete its folder"):
        open_tracker(f"tensorboard:{tmp_path}", "run")
