"""`fedmpq bench`: latency and memory of exported models on this machine, each in a process of its own."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.export.speed import latencies
from fedmpq.export.target import Runner
from fedmpq.export.targets import target_of

PERCENTILES = (50, 90, 99)
PR_SET_PDEATHSIG = 1
HEADER = "model                           load ms    p50 ms    p90 ms    p99 ms  images/s  peak MB"


class BenchError(ValueError):
    """A measurement that failed, or settings it cannot be made with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure exported models: latency percentiles and peak memory."
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help=".onnx, .pte.xz or .pte files")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the runtime (default: 1)")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="for each (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per model")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)


def run_command(arguments: argparse.Namespace) -> int:
    for name in ("batch", "threads", "seconds"):
        if not 0 < getattr(arguments, name) < math.inf:
            raise BenchError(f"--{name} {getattr(arguments, name)} must be above 0 and finite")
    if arguments.in_process:
        _end_with_parent()
        print(json.dumps(measured(arguments.models[0], arguments)))
        return 0
    if not arguments.json:
        print(HEADER)
    for path in arguments.models:
        facts = _in_fresh_process(path, arguments)
        print(json.dumps(facts) if arguments.json else _row(facts), flush=True)
    return 0


def measured(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    runner = _loaded(path, arguments.threads)
    load = time.perf_counter() - start
    shape = (arguments.batch, *runner.image_shape)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    times = latencies({"model": lambda: runner.logits(images)}, arguments.seconds)["model"]
    return {
        "model": str(path),
        "batch": arguments.batch,
        "threads": arguments.threads,
        "load_milliseconds": round(load * 1e3, 2),
        **{f"p{p}_milliseconds": round(float(np.percentile(times, p)) * 1e3, 4) for p in PERCENTILES},
        "images_per_second": round(arguments.batch / float(np.median(times)), 1),
        "peak_megabytes": round(_peak_bytes() / 1e6, 1),
    }


def _peak_bytes() -> int:
    """Peak of resident memory (VmHWM); getrusage would count what the parent process had at the fork."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchError("/proc/self/status has no VmHWM; peak memory needs Linux")


def _loaded(path: Path, threads: int) -> Runner:
    target = target_of(path)
    try:
        return target.run(path, threads)
    except ModuleNotFoundError as error:
        raise BenchError(
            f'{path.name} needs {error.name}, which is not installed: pip install "fedmpq[export]"'
        ) from None


def _in_fresh_process(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    options = [f"--{name}={getattr(arguments, name)}" for name in ("batch", "threads", "seconds")]
    command = [sys.executable, "-m", "fedmpq.cli", "bench", "--in-process", *options, "--", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or ["no message"]
        raise BenchError(reason[-1].removeprefix("fedmpq bench: "))
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _end_with_parent() -> None:
    """However the parent ends. By the kernel: a thread that looks would wake up within what is measured."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _row(facts: dict[str, Any]) -> str:
    times = "".join(f"{facts[f'p{p}_milliseconds']:10.3f}" for p in PERCENTILES)
    return (
        f"{Path(facts['model']).name:<30}{facts['load_milliseconds']:9.1f}{times}"
        f"{facts['images_per_second']:10.1f}{facts['peak_megabytes']:9.1f}"
    )
