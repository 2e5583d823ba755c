"""`fedmpq split`: the parts of a simulation, as files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpq.cli.main import main
from fedmpq.data.open_source import load
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.simulation import prepare

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_parts_are_those_of_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["split", "--data", "digits", "--clients", "3", "--model", "digits_cnn", "--seed", "5"]
    assert main([*words, "-o", str(tmp_path)]) == 0
    experiment = Experiment("digits", model="digits_cnn", budgets=(2, 4, 8), seed=5)
    prepared = prepare(experiment)
    for number, indices in enumerate(prepared.parts):
        part, expected = load(tmp_path / f"client-{number}.npz", "train"), prepared.train.subset(indices)
        np.testing.assert_array_equal(part.images, expected.images)
        np.testing.assert_array_equal(part.labels, expected.labels)
        assert part.class_names == expected.class_names
    np.testing.assert_array_equal(load(tmp_path / "test.npz", "test").images, prepared.test.images)
    settings = tomllib.loads((tmp_path / "run.toml").read_text())
    image = prepared.start.graph.input
    assert settings["image"] == [image.height, image.width, image.channels]
    assert (settings["input_scale"], settings["input_zero_point"]) == (image.scale, image.zero_point)
    assert "wrote 3 parts" in capsys.readouterr().out


def test_too_many_clients_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", "--data", "digits", "--clients", "9999", "-o", str(tmp_path / "x")]) == 2
    assert "cannot give 9999 clients" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
