"""Measured values on boards, with one range for all codes that the boards agree on: equal to a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.data.npz import NpzSource
from fedmpq.data.value_range import agreed_range
from tests.federation.federation import Federation, assert_same

_save: Any = np.savez
CLASSES = 10


def measured(path: Path) -> Path:
    """Two channels in different units, one of them with values that a few samples alone reach."""
    random = np.random.default_rng(3)
    arrays: dict[str, Any] = {}
    for samples, labels, count in (("samples", "labels", 120), ("samples_test", "labels_test", 40)):
        numbers = np.arange(count) % CLASSES
        values = random.normal(0, 0.2, (count, 2, 8, 8)) + numbers[:, None, None, None]
        values[:, 1] *= -1000
        values[::17, 0, 0, 0] = 60
        arrays |= {samples: values.astype(np.float32), labels: numbers}
    _save(path, **arrays)
    return path


def test_measured_values_train_as_in_a_simulation(tmp_path: Path) -> None:
    data = measured(tmp_path / "measured.npz")
    settings = {"profile": "paper", "rounds": 2, "min_clients": 3, "data_range": "boards"}
    split = ("--data-range", "boards")
    with Federation(tmp_path, (2, 4, 8), settings, data=str(data), split=split) as federation:
        federation.start_server()
        federation.start_boards()
        assert_same(federation.finish(), federation.simulated())
        stored = federation.stored()
        parts = [NpzSource(tmp_path / "parts" / f"client-{n}.npz") for n in range(3)]
        reported = [part.bounds("train") for part in parts]
        assert stored.value_range == agreed_range([each for each in reported if each is not None])
        assert "the boards agreed on a range" in (tmp_path / "server.log").read_text()
        test = stored.load_test_data()
        assert test is not None
        assert test.image_shape == (8, 8, 2)
        assert all(row["mean_deployed"] is not None for row in federation.history())
