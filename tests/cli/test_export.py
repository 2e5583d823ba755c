"""`fedmpq export` writes what devices run: the moving average, with statistics of its quantized weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedmpq.cli.main import main
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.lab.checkpoint import Checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.simulation import prepare
from fedmpq.method.state import Average
from fedmpq.model.batch_statistics import quantized_statistics
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.quantized import QuantizedLayer, Weights, dequantize_all


def enlarged(tensors: Weights, seed: int) -> Weights:
    """The same, each number made up to a third larger."""
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(tensor * random.uniform(1, 1.3, tensor.shape), np.float32)
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """As after some rounds: a model, and an average that is another one."""
    experiment = Experiment("digits", model="digits_cnn", profile="best", budgets=(2.0, 4.0, 2.0))
    start = prepare(experiment).start
    average = Average(enlarged(start.model.weights, 1), enlarged(start.model.side, 2))
    return replace(start, model=replace(start.model, round=3, average=average))


@pytest.mark.parametrize("averaged", [True, False])
def test_files_hold_the_average_and_its_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint, averaged: bool
) -> None:
    graph, model = checkpoint.graph, checkpoint.model
    assert model.average is not None
    weights, side = (model.average.weights, model.average.side) if averaged else (model.weights, model.side)
    save_checkpoint(
        tmp_path, checkpoint if averaged else replace(checkpoint, model=replace(model, average=None))
    )
    words = ["export", "--run", str(tmp_path), "--all", "--no-speed", "--json", "-o", str(tmp_path / "out")]
    assert main(words) == 0
    cards = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [card["clients"] for card in cards] == [[0, 2], [1]]
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    for card in cards:
        layers = {
            name: QuantizedLayer.from_weights(weights[name], bits, "least_error", False)
            for name, bits in card["bit_widths"].items()
        }
        statistics = quantized_statistics(graph, weights, dequantize_all(layers), side)
        expected = logits(compile_program(graph, layers, statistics), images)
        np.testing.assert_array_equal(OnnxRunner(Path(card["path"])).logits(images), expected)
        plain = logits(compile_program(graph, layers, side), images)
        assert not np.array_equal(plain, expected)


def test_a_budget_takes_the_average_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Checkpoint
) -> None:
    save_checkpoint(tmp_path, checkpoint)
    words = ["export", "--run", str(tmp_path), "--no-speed", "--json", "-o", str(tmp_path / "out")]
    assert main([*words, "--budget", "4"]) == 0
    assert main([*words, "--client", "1"]) == 0
    budget, client = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (budget["clients"], client["clients"]) == ([], [1])
    assert budget["bit_widths"] == client["bit_widths"]
    images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
    one, other = (OnnxRunner(Path(card["path"])).logits(images) for card in (budget, client))
    np.testing.assert_array_equal(one, other)
