"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedmpq

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SAYS = {
    "own_model.py": "bits per weight",
    "own_data.py": "mean_deployed",
    "own_aggregation.py": "mean_deployed",
    "quantize_and_export.py": "equal to the bit in ONNX Runtime",
}
QUICK = {
    "anomaly_detection.py": "autoencoder: auroc",
    "image_classification.py": "resnet8: accuracy",
    "keyword_spotting.py": "ds_cnn: accuracy",
    "visual_wake_words.py": "mobilenet_v1_025: accuracy",
}
"""Those that take a minute have a short form."""
NEEDS_A_RUN = {"plot_a_run.py"}
HELPERS = {"beside_fp32.py"}


def play(name: str, cwd: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=600,
        env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys() | QUICK.keys() | NEEDS_A_RUN | HELPERS


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert SAYS[name] in play(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK))
def test_an_example_of_mlperf_tiny_runs_end_to_end(name: str, tmp_path: Path) -> None:
    told = play(name, tmp_path, "--quick").splitlines()
    assert told[0].startswith(QUICK[name])
    assert [line.split("  ")[0] for line in told[1:5]] == [
        "full precision",
        *(f"{bits} bits per weight" for bits in (2, 4, 8)),
    ]


def test_a_run_is_plotted(tmp_path: Path) -> None:
    fedmpq.simulate(
        "digits_cnn",
        "digits",
        budgets=[2, 8],
        rounds=1,
        epochs=1,
        train_limit=60,
        test_limit=40,
        participation=1.0,
        workers=1,
        folder=tmp_path / "run",
        progress=False,
    )
    assert "1 rounds of run" in play("plot_a_run.py", tmp_path, "run", "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
