"""Models of other tasks than classification: what they predict, their cards, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedmpq.cli.main import main
from fedmpq.export.exporting import LabelledImages, export_model
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT, Flatten
from fedmpq.model.metrics import score_of
from fedmpq.model.task import Task, input_values
from tests.training.small_graphs import Net, random_state

TASKS: tuple[Task, ...] = ("classification", "multi_label", "regression", "reconstruction")
NAMES = tuple(f"n{number}" for number in range(12))


def deployed(task: Task) -> DeployedModel:
    net = Net(3, 2, 2)
    graph = net.graph(net.linear(net.add(Flatten(), INPUT), 8, relu=0.0), outputs=12)
    layers, side = random_state(graph, bits=(8,))
    return DeployedModel(replace(graph, task=task), layers, side, NAMES)


def pixels(count: int = 40) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (count, 2, 2, 3)).astype(np.uint8)


def measured_on(task: Task) -> LabelledImages:
    random = np.random.default_rng(2)
    targets = random.integers(0, 2, (40, 12)).astype(np.float32)
    labels, marks = random.integers(0, 12, 40), random.integers(0, 2, 40).astype(np.bool_)
    has = task in ("multi_label", "regression")
    return LabelledImages(pixels(), labels, "test", targets if has else None, marks)


def test_predictions_fit_the_task() -> None:
    outputs = deployed("regression").logits(pixels())
    np.testing.assert_array_equal(deployed("classification").predict(pixels()), outputs.argmax(axis=1))
    shares = deployed("multi_label").predict(pixels())
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-outputs.astype(np.float64))), rtol=1e-5)
    np.testing.assert_array_equal(deployed("regression").predict(pixels()), outputs)
    model = deployed("reconstruction")
    values = input_values(model.graph.input.scale, model.graph.input.zero_point, pixels())
    expected = [
        np.mean((row.astype(np.float64) - value) ** 2) for row, value in zip(outputs, values, strict=True)
    ]
    np.testing.assert_allclose(model.anomaly_scores(pixels()), expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_model_tells_its_score(task: Task) -> None:
    model, tests = deployed(task), measured_on(task)
    given = tests.labels if tests.targets is None else tests.targets
    expected = score_of(model.graph, model.logits(tests.images), tests.images, given, tests.anomalous)
    assert model.score(tests.images, given, anomalous=tests.anomalous) == expected
    if task == "reconstruction":
        assert model.score(tests.images).value == model.score(tests.images, tests.labels).value
    else:
        with pytest.raises(ValueError, match="give the labels or targets"):
            model.score(tests.images)
        with pytest.raises(ValueError, match="has no anomaly scores"):
            model.anomaly_scores(tests.images)
    if task != "classification":
        with pytest.raises(ValueError, match=f"{task} has no accuracy: call score"):
            model.accuracy(tests.images, tests.labels)
    with pytest.raises(ValueError, match="40 images and 3 answers"):
        model.score(tests.images, given[:3])


@pytest.mark.parametrize("task", TASKS)
def test_files_say_what_they_are_for(task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tests = deployed(task), measured_on(task)
    exported = export_model(model, tmp_path / "model.onnx", tests=tests)
    given = tests.labels if tests.targets is None else tests.targets
    score = model.score(tests.images, given, anomalous=tests.anomalous)
    card = json.loads((tmp_path / "model.onnx.json").read_text(encoding="utf-8"))
    assert card == exported.card
    metric = {"classification": "accuracy", "multi_label": "f1"}.get(task, "r2")
    assert (card["task"], card["metric"], card[metric]) == (task, metric, score.value)
    assert {name: card[name] for name in score.others} == score.others
    assert card["class_names"] == ([] if task == "reconstruction" else list(NAMES))
    Image.fromarray(pixels()[0]).save(tmp_path / "image.png")
    words = ["predict", str(tmp_path / "model.onnx"), str(tmp_path / "image.png"), "--top", "3"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    found = model.predict(pixels()[:1])
    if task == "classification":
        assert told["classes"][0]["class"] == NAMES[int(found[0])]
    elif task == "multi_label":
        best = np.argsort(-found[0])[:3]
        assert [each["label"] for each in told["labels"]] == [NAMES[k] for k in best]
        assert [each["probability"] for each in told["labels"]] == pytest.approx(found[0][best])
    elif task == "regression":
        assert list(told["values"].values()) == pytest.approx(found[0])
        assert len(lines) == 13
    else:
        assert told["error"] == pytest.approx(model.anomaly_scores(pixels()[:1])[0])
        assert lines[1].endswith("mean squared error of the reconstruction")


def test_a_card_without_tests_measures_nothing(tmp_path: Path) -> None:
    card = export_model(deployed("regression"), tmp_path / "model.onnx").card
    assert (card["metric"], card["r2"]) == ("r2", None)
