"""Counts the instructions of a training step on emulated boards: `python -m tools.arm_instructions`.

Prints, for ResNet-20, how many instructions a step takes in each function of the C++ library by portable code
and by the board's own instruction set. Counts repeat exactly, where times under emulation mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from fedmpq.exchange.messages import PlanError, TrainingPlan
from tools import arm_board, rounds, wheels
from tools.arm_board import SCALABLE, Board, BoardError
from tools.instruction_marks import AFTER, BEFORE

TOOLS = Path(__file__).resolve().parent
OWN_ISA = {
    "cortex-a72": "neon",
    "cortex-a76": "neon_dot",
    "max": "neon_i8mm",
    **dict.fromkeys(SCALABLE, "sve"),
}

Counts = Counter[str]


class Counting:
    """A board with the plugin at hand; everything made is in `scratch`."""

    def __init__(self, board: Board, scratch: Path) -> None:
        self._board, self._scratch = board, scratch
        self._site, self._plugin = scratch / "site", scratch / "instruction_counter.so"
        compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if compiler is None:
            raise BoardError("no C compiler found for qemu's plugin: install one, e.g. gcc")
        source = TOOLS / "instruction_counter.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", self._plugin, source], check=True)

    def step(self, source: Path, cpu: str, isa: str) -> Counts:
        """Instructions by function of the library, over the round in `source`."""
        if not self._site.exists():
            wheel = wheels.build("aarch64")
            wheels.install([str(wheel), "--no-deps"], "aarch64", self._board.python_version(), self._site)
        return self._count(cpu, "counted_step.py", source, isa)

    def inference(self, models: Path, cpu: str) -> Counts:
        """Instructions of one run of every model in the folder."""
        return self._count(cpu, "counted_inference.py", models)

    def _count(self, cpu: str, script: str, *arguments: str | Path) -> Counts:
        marks = self._scratch / "marks.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self._site}{os.pathsep}{TOOLS.parent}",
            "QEMU_PLUGIN": f"{self._plugin},out={marks}",
        }
        command = [str(self._board.launcher(cpu)), str(TOOLS / script), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BoardError(f"{script} on the {cpu} failed:\n{done.stdout}{done.stderr}")
        return counted(json.loads(done.stdout), marks.read_text(encoding="ascii"))


def counted(called: list[str], marks: str) -> Counts:
    lines = [tuple(map(int, line.split())) for line in marks.splitlines()]
    if [number for number, _ in lines] != [BEFORE, AFTER] * len(called):
        raise BoardError(f"{len(called)} calls left {len(lines)} marks; only one thread may run")
    counts: Counts = Counter()
    for i, name in enumerate(called):
        counts[name] += lines[2 * i + 1][1] - lines[2 * i][1]
    return counts


def convolutions(counts: Counts) -> int:
    """Of the products of every layer, with the sums over them that are taken on the way."""
    return sum(count for name, count in counts.items() if name.startswith("fedmpq_conv_"))


def counted_steps(model: str, batch: int, cpus: Iterable[str]) -> Iterator[tuple[str, Counts, Counts]]:
    """Of one training step on each board: its name, the counts of portable code and of its own set."""
    with TemporaryDirectory() as scratch:
        counting = Counting(arm_board.make(), Path(scratch))
        source = Path(scratch) / "round.npz"
        rounds.make(source, model, (3, 32, 32), batch, TrainingPlan(epochs=1, batch_size=batch))
        for cpu in cpus:
            yield cpu, counting.step(source, cpu, "scalar"), counting.step(source, cpu, OWN_ISA[cpu])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.arm_instructions", description=__doc__)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    try:
        print(f"{arguments.model}, one training step of batch {arguments.batch}, millions of instructions\n")
        for cpu, scalar, own in counted_steps(arguments.model, arguments.batch, OWN_ISA):
            _print(cpu, OWN_ISA[cpu], scalar, own)
    except (BoardError, PlanError, wheels.WheelError) as error:
        sys.exit(f"arm_instructions: {error}")


def _print(cpu: str, isa: str, scalar: Counts, own: Counts) -> None:
    print(f"| {cpu} | scalar | {isa} | ratio |\n|---|---:|---:|---:|")
    rows = [(name.removeprefix("fedmpq_"), scalar[name], own[name]) for name, _ in scalar.most_common()]
    rows = [row for row in rows if row[1] >= 50_000]
    rows.append(("convolutions together", convolutions(scalar), convolutions(own)))
    rows.append(("the library altogether", scalar.total(), own.total()))
    for name, before, after in rows:
        print(f"| {name} | {before / 1e6:.1f} | {after / 1e6:.1f} | {before / after:.1f} |")
    print(flush=True)


if __name__ == "__main__":
    main()
