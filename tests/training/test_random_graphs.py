"""Random valid graphs through the engines, in a process of its own that a stray write may end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("FEDMPQ_FUZZ_SECONDS", "10"))


@pytest.mark.slow
def test_random_graphs_run_or_are_refused() -> None:
    """FEDMPQ_FUZZ_SECONDS runs it longer, FEDMPQ_FUZZ_SEED begins elsewhere than at today's seeds."""
    first = os.environ.get("FEDMPQ_FUZZ_SEED", str(int(time.time()) // 86400 * 100_000))
    command = [
        sys.executable,
        "-m",
        "tests.training.random_graphs",
        "--seconds",
        str(SECONDS),
        "--seed",
        first,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 300)
    lines = ended.stdout.splitlines()
    print(f"{len(lines)} graphs from seed {first}")
    assert ended.returncode == 0, f"ended by {ended.returncode} at: {lines[-1:]}\n{ended.stderr[-4000:]}"
    outcomes = [line.partition(": ")[2] for line in lines]
    assert sum(each == "trained" for each in outcomes) * 2 > len(outcomes) > 0, "hardly any graph was trained"


def test_a_kernel_of_more_than_1024_taps_runs() -> None:
    """Once they were kept in an array of 1024 on the stack; seeds of such graphs stay in the suite."""
    command = [sys.executable, "-c", _LARGE_KERNELS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"ended by {ended.returncode}\n{ended.stderr[-4000:]}"


_LARGE_KERNELS = """
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import INPUT
from tests.training.random_graphs import forward, trained
from tests.training.small_graphs import Net, random_batch, random_state

for channels, groups, dilation in ((1, 1, (1, 1)), (2, 2, (1, 1)), (2, 1, (2, 1))):
    net = Net(2, 40, 36)
    large = dict(kernel=(33, 33), padding=(16 * dilation[0], 16), dilation=dilation, groups=groups)
    graph = net.graph(net.conv(net.conv(INPUT, 2, (1, 1), padding=(0, 0)), 2, **large))
    layers, side = random_state(graph)
    images = random_batch(graph, 2)
    forward(graph, layers, side, images, 2)
    assert isinstance(trained(graph, layers, side, TrainingPlan(), images, 2), dict)
"""
