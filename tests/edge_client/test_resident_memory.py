"""How much memory the whole client process takes while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq.model.exchange import TrainingPlan
from tests import local_round
from tests.zoo_rounds import save_zoo_round

MEGABYTES = 120


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
def test_a_client_that_trains_resnet20_stays_small(tmp_path: Path) -> None:
    """Python, NumPy, gRPC and two steps of batch 64 together; no torch in the process."""
    source = tmp_path / "round.npz"
    save_zoo_round(
        source, "resnet20", (3, 32, 32), 128, TrainingPlan(epochs=1, batch_size=64, pad=4, flip=True)
    )
    script = "import grpc, runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [
        sys.executable,
        "-c",
        script,
        local_round.__file__,
        str(source),
        str(tmp_path / "result.npz"),
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["heavy"] == []
    assert report["peak_mb"] < MEGABYTES, report
