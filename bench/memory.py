"""Peak memory growth while training, each rival in a fresh process.

`python -m bench.memory native|torch FILE` is that process. Growth is the peak of resident memory (VmHWM,
reset at the start) less what was resident when training starts. Model and batches are in memory then, and
so is torch's optimizer, because making one imports 70 MB of torch's compiler; momentum, gradients and
activations are not, nor is the native engine's own copy of the model. A part of the growth is pages of
shared libraries touched for the first time (`library_mb`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from bench.workload import Workload, engine_trainer
from fedmpq.exchange.messages import UpdateRule

ROOT = Path(__file__).parent.parent
STEPS = 3  # momentum exists from the second on


@dataclass(frozen=True)
class Growth:
    """Megabytes (10^6 bytes)."""

    growth_mb: float
    library_mb: float
    peak_mb: float
    """Of the whole process, interpreter included."""


def growths(
    work: Workload, threads: int, isa: str, update: UpdateRule, rivals: Sequence[str] = ("native", "torch")
) -> dict[str, Growth]:
    """Of the native engine in a process without torch, and of torch fp32."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.npz"
        work.save(path)
        return {rival: _in_fresh_process(rival, path, threads, isa, update) for rival in rivals}


def _in_fresh_process(rival: str, path: Path, threads: int, isa: str, update: UpdateRule) -> Growth:
    command = [
        sys.executable,
        "-m",
        "bench.memory",
        rival,
        str(path),
        "--threads",
        str(threads),
        "--update",
        update,
    ]
    environment = {**os.environ, "FEDMPQ_ISA": isa}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {rival} failed: {done.stderr.strip()}")
    return Growth(**json.loads(done.stdout))


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory needs Linux")


def measured(training: Callable[[], object]) -> Growth:
    """Of what happens in `training`."""
    # 5 resets the peak of resident memory to what is resident now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    resident, library = _status_bytes("VmRSS"), _status_bytes("RssFile")
    training()
    peak, touched = _status_bytes("VmHWM"), _status_bytes("RssFile") - library
    megabytes = (round(size / 1e6, 2) for size in (peak - resident, touched, peak))
    return Growth(*megabytes)


def _native(work: Workload, threads: int, update: UpdateRule) -> Growth:
    from fedmpq.training.native_engine import NativeEngine

    growth = measured(lambda: engine_trainer(NativeEngine(threads), work, update)(STEPS))
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch was imported beside the native engine, so its memory is not the engine's alone"
        )
    return growth


def _torch(work: Workload, threads: int) -> Growth:
    import torch

    from bench import torch_rivals

    torch.set_num_threads(threads)
    train = torch_rivals.trainer(torch_rivals.float_module(work), torch_rivals.float_batches(work))
    return measured(lambda: train(STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("rival", choices=("native", "torch"))
    parser.add_argument("file", type=Path, help="a workload")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--update", choices=get_args(UpdateRule), default="paper")
    arguments = parser.parse_args()
    work = Workload.load(arguments.file)
    if arguments.rival == "native":
        growth = _native(work, arguments.threads, arguments.update)
    else:
        growth = _torch(work, arguments.threads)
    print(json.dumps(asdict(growth)))


if __name__ == "__main__":
    main()
