"""How time and memory grow: of a step over batch, width and depth, of a round over model size and boards, of
an export over layers.

Each row is one quantity over a few sizes, all else being equal, and the exponent `p` of `y ~ x^p`: the slope
of `log y` over `log x` among the largest three sizes, where what does not grow counts least. Width grows the
multiplications of a step with its square, so `x` is the number of weights there; 1 is linear. Times are of
the processor and not of the clock, so that other work on the machine counts for less. Networks are plain
chains of 3x3 convolutions with BatchNorm at 16x16 pixels, but for the merges, which are of the zoo's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bench.machine import Machine
from bench.memory import ROOT, growths
from bench.merge import a_round
from bench.pages import measured_on, with_generated
from bench.timing import load_average
from bench.workload import Workload, engine_trainer, quantized, random_batches
from fedmpq import kernels
from fedmpq.export.exporting import export_model
from fedmpq.method.robust import Aggregation
from fedmpq.model.deployed import DeployedModel
from fedmpq.training.native_engine import NativeEngine

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"

IMAGE = (3, 16, 16)
WIDTH, DEPTH, BATCH = 32, 8, 16
BATCHES = (4, 8, 16, 32, 64, 128)
WIDTHS = (16, 32, 64, 128)
DEPTHS = (4, 8, 16, 32)
EXPORTED_DEPTHS = (8, 16, 32, 64)
MERGED_MODELS = ("resnet8", "resnet20", "resnet44", "resnet18")
BOARDS = (5, 10, 20, 40, 80)
RULES: tuple[Aggregation, ...] = ("mean", "agreement")
STEPS = 4
FITTED = 3
LINEAR = 1.1
"""Up to here a slope of measured times counts as linear."""


@dataclass(frozen=True)
class Row:
    """One quantity over sizes."""

    what: str
    over: str
    sizes: Sequence[float]
    values: Sequence[float]
    unit: str

    @property
    def exponent(self) -> float:
        """The slope among the largest sizes."""
        x, y = (np.log(np.asarray(column[-FITTED:], np.float64)) for column in (self.sizes, self.values))
        return float(np.polyfit(x, y, 1)[0])

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "exponent": round(self.exponent, 3)}


def chain(width: int, depth: int) -> nn.Module:
    """`depth` convolutions of `width` channels and a linear layer."""
    parts: list[nn.Module] = []
    for index in range(depth):
        parts += [nn.Conv2d(width if index else IMAGE[0], width, 3, padding=1, bias=False)]
        parts += [nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def workload(width: int = WIDTH, depth: int = DEPTH, batch: int = BATCH) -> Workload:
    torch.manual_seed(0)
    graph, layers, side = quantized(chain(width, depth), f"chain-{width}x{depth}", IMAGE)
    return Workload(graph, layers, side, random_batches(graph, batch))


def cpu_seconds(job: Callable[[], object], repetitions: int) -> float:
    """The median of some calls, after one that fills caches."""
    job()
    taken = []
    for _ in range(repetitions):
        start = time.process_time()
        job()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def step_rows(over: str, works: Mapping[float, Workload], repetitions: int) -> list[Row]:
    """Milliseconds and megabytes of a training step on one thread."""
    times, memory = [], []
    for work in works.values():
        train = engine_trainer(NativeEngine(1), work, "carried")
        times.append(1e3 * cpu_seconds(partial(train, STEPS), repetitions) / STEPS)
        memory.append(growths(work, 1, kernels.isa(), "carried", ["native"])["native"].growth_mb)
    sizes = list(works)
    return [
        Row("a training step", over, sizes, times, "CPU ms"),
        Row("its memory", over, sizes, memory, "MB"),
    ]


def merge_row(over: str, rounds: Sequence[tuple[str, int]], rule: Aggregation, repetitions: int) -> Row:
    """Milliseconds from the bytes of a round's updates to the next model."""
    sizes, times = [], []
    for name, boards in rounds:
        method, model, updates = a_round(name, boards, rule)
        sizes.append(float(boards if over == "boards" else sum(method.graph.layer_sizes)))
        times.append(1e3 * cpu_seconds(partial(method.merge, model, updates), repetitions))
    return Row(f"a merge, `{rule}`", over, sizes, times, "CPU ms")


def export_row(repetitions: int) -> Row:
    """Milliseconds of an export to ONNX, verified by the runtime."""
    times = []
    for depth in EXPORTED_DEPTHS:
        work = workload(depth=depth)
        with tempfile.TemporaryDirectory() as folder:
            export = partial(export_model, path=Path(folder) / "model.onnx")
            model = DeployedModel(work.graph, work.layers, work.side)
            times.append(1e3 * cpu_seconds(partial(export, model), repetitions))
    return Row("an export to ONNX, verified", "layers", EXPORTED_DEPTHS, times, "CPU ms")


def measure(repetitions: int) -> list[Row]:
    rows = step_rows("images in a batch", {n: workload(batch=n) for n in BATCHES}, repetitions)
    wide = [workload(width=width) for width in WIDTHS]
    rows += step_rows("weights, by width", {sum(w.graph.layer_sizes): w for w in wide}, repetitions)
    rows += step_rows("layers", {depth: workload(depth=depth) for depth in DEPTHS}, repetitions)
    for rule in RULES:
        rows.append(merge_row("weights", [(name, 5) for name in MERGED_MODELS], rule, repetitions))
        rows.append(merge_row("boards", [("resnet20", boards) for boards in BOARDS], rule, repetitions))
    return [*rows, export_row(repetitions)]


def table(rows: Sequence[Row]) -> str:
    """In Markdown, what grows faster than linearly in bold."""
    lines = ["| what | over | sizes | measured | exponent |", "|---|---|---|---|---:|"]
    for row in rows:
        exponent = f"{row.exponent:.2f}"
        cells = (
            row.what,
            row.over,
            ", ".join(f"{size:,.0f}" for size in row.sizes),
            f"{', '.join(f'{value:,.3g}' for value in row.values)} {row.unit}",
            f"**{exponent}**" if row.exponent > LINEAR else exponent,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="of each, the median counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = load_average()
    rows = measure(arguments.repetitions)
    loads = {"load_average_before": before, "load_average_after": load_average()}
    if arguments.json:
        facts = {"bench": "growth", **Machine.here().as_dict(), **loads}
        print(json.dumps({**facts, "rows": [row.as_dict() for row in rows]}))
        return
    told = f"{measured_on(Machine.here())} Load average {before[0]} before."
    print(table(rows))
    if arguments.page:
        text = with_generated(PAGE.read_text(encoding="utf-8"), f"{told}\n\n{table(rows)}", BEGIN, END)
        PAGE.write_text(text, encoding="utf-8")
        print(f"written to {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
