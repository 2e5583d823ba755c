"""What something costs on this machine, to be compared with what else costs in the same run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedmpq.model.graph import Graph

ROOT = Path(__file__).resolve().parent.parent


def cpu_seconds(work: Callable[[], object], repetitions: int = 5) -> float:
    """The least processor time of several calls: the time that other processes take is not in it."""

    def once() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(repetitions))


def peak_mb_after(statement: str) -> float:
    """The most memory that a fresh Python has resident while it runs the statement, in 10^6 bytes."""
    script = f"{statement}\nfrom tools.rounds import peak_mb\nprint(peak_mb())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def float_activations_mb(graph: Graph, batch: int) -> float:
    """What the outputs of all nodes take for one batch in fp32, as an ordinary framework keeps them."""
    return 4 * batch * sum(int(np.prod(shape)) for shape in graph.shapes.values()) / 1e6
