"""How much memory the whole client process takes while it trains."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq.exchange.messages import TrainingPlan
from tests.cost import float_activations_mb, peak_mb_after
from tools import rounds

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
def test_a_client_that_trains_resnet20_stays_small(tmp_path: Path) -> None:
    """Two steps of batch 64 take an eighth of what one batch's activations alone would take in fp32."""
    source = tmp_path / "round.npz"
    rounds.make(source, "resnet20", (3, 32, 32), 128, TrainingPlan(epochs=1, batch_size=64, pad=4, flip=True))
    script = "import grpc, runpy; runpy.run_module('tools.rounds', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "result.npz"), "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["heavy"] == []
    before = peak_mb_after("import grpc, fedmpq.training.native_engine")
    room = float_activations_mb(rounds.load(source).graph, 64) / 8
    assert report["peak_mb"] - before < room, (report, before, room)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
def test_a_client_that_measures_resnet20_stays_small(tmp_path: Path) -> None:
    """A calibration of batches of 64 takes less than six values as large as the widest layer's."""
    source = tmp_path / "round.npz"
    rounds.make(source, "resnet20", (3, 32, 32), 128, TrainingPlan(epochs=1, batch_size=64))
    made = f"from tools import rounds\nfrom pathlib import Path\ngiven = rounds.load(Path({str(source)!r}))\n"
    made += "from fedmpq.training.local_calibration import run_calibration"
    measured = f"{made}\nrun_calibration(given.graph, given.assignment, given.data)"
    graph = rounds.load(source).graph
    widest = 4 * 64 * max(math.prod(shape) for shape in graph.shapes.values()) / 1e6
    assert peak_mb_after(measured) - peak_mb_after(made) < 6 * widest
