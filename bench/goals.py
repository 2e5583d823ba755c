"""What the toolchain aims at in speed and size, beside what was measured: one row a goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.arm_steps import Ratio
from bench.real_boards import BUDGET, Boards
from bench.scaling import Scaling
from bench.timing import Spread

Facts = Mapping[str, Any]

STEP_GOALS = {
    ("resnet20", 1): 3.0,
    ("resnet20", 16): 3.3,
    ("resnet20", 64): 3.5,
    ("mobilenet_v2", 1): 2.0,
    ("mobilenet_v2", 16): 2.5,
    ("mobilenet_v2", 64): 3.0,
}
"""Times as fast as torch fp32, one thread."""
THREADS_GOAL = 1.8
INSTRUCTION_GOALS = {"cortex-a72": 10.0, "cortex-a76": 18.0}
EXECUTORCH_GOAL = 2.0


@dataclass(frozen=True)
class Goal:
    what: str
    goal: float
    found: Spread | None
    unit: str = ""
    at_most: bool = False
    missing: str = ""
    """Why it was not measured."""

    @property
    def reached(self) -> bool:
        """By the median."""
        if self.found is None:
            return False
        return self.found.median <= self.goal if self.at_most else self.found.median >= self.goal

    def row(self) -> str:
        goal = f"{'≤' if self.at_most else '≥'} {self.goal:g}{self.unit}"
        if self.found is None:
            return f"| {self.what} | {goal} | not measured: {self.missing} | |"
        least, greatest = f"{self.found.least:.2f}", f"{self.found.greatest:.2f}"
        spread = "" if least == greatest else f" ({least} to {greatest})"
        cells = (self.what, goal, f"{self.found.median:.2f}{self.unit}{spread}")
        return f"| {' | '.join(cells)} | {'yes' if self.reached else '**no**'} |"


def goals(
    steps: Sequence[Facts],
    threads: Scaling | None,
    models: Sequence[Facts],
    boards: Boards,
    arm: Mapping[str, Ratio] | str,
) -> Iterator[Goal]:
    """Of what `bench.performance` measures; `arm` is why there are no counts, where there are none."""
    of = f"x of ResNet-20's {BUDGET:g} bits"
    yield Goal(f"wire down, {of}", 0.85, boards.down, "x", at_most=True)
    yield Goal(f"wire up, {of}", 0.70, boards.up, "x", at_most=True)
    by_model = {facts["model"]: facts for facts in models}
    size = by_model["resnet20"]["onnx_size_ratio"]
    yield Goal(f".onnx, {of}", 1.05, _exactly(size), "x", at_most=True)
    yield from _step_goals(steps)
    yield from _thread_goals(threads)
    yield from _inference_goals(by_model["mobilenet_v2"])
    yield Goal("client process that trains ResNet-20, batch 64", 75, boards.client_mb, " MB", at_most=True)
    yield Goal("the engine alone, with gRPC loaded", 75, boards.engine_mb, " MB", at_most=True)
    for cpu, goal in INSTRUCTION_GOALS.items():
        what = f"instructions of MobileNetV2's step, batch 16, scalar twin / own, {cpu}"
        if isinstance(arm, str):
            yield Goal(what, goal, None, "x", missing=arm)
        else:
            yield Goal(what, goal, _exactly(arm[cpu].library), "x")


def _step_goals(steps: Sequence[Facts]) -> Iterator[Goal]:
    # The first of a model and batch has the best instruction set.
    first = {(facts["model"], facts["batch"], facts["threads"]): facts for facts in reversed(steps)}
    for (model, batch), goal in STEP_GOALS.items():
        found = _spread(first[model, batch, 1]["spreads"]["speedup_vs_torch_fp32"])
        yield Goal(f"training {model}, batch {batch}, x torch fp32", goal, found, "x")


def _thread_goals(threads: Scaling | None) -> Iterator[Goal]:
    what = "two threads against one, ResNet-20, cores that share"
    for near, words in ((True, "a cache"), (False, "none")):
        found = None if threads is None else threads.spread(near)
        if found is not None:
            yield Goal(f"{what} {words}", THREADS_GOAL, found, "x")
    if threads is None or not threads.samples:
        yield Goal(f"{what} a cache", THREADS_GOAL, None, "x", missing="no two cores, or they were moved")


def _inference_goals(facts: Facts) -> Iterator[Goal]:
    for each in facts["batches"]:
        place = f"mobilenet_v2, batch {each['batch']}"
        ahead = _spread(each["onnx_ahead_of_static_int8"])
        yield Goal(f"ONNX, {place}, x static int8", 1.0, ahead, "x")
    for each in facts["batches"]:
        found = _spread(each["speedups"]["executorch"])
        place = f"mobilenet_v2, batch {each['batch']}"
        yield Goal(f"ExecuTorch, {place}, x fp32", EXECUTORCH_GOAL, found, "x")


def _spread(facts: Mapping[str, float]) -> Spread:
    return Spread(facts["median"], facts["least"], facts["greatest"])


def _exactly(value: float) -> Spread:
    return Spread(value, value, value)


def table(found: Sequence[Goal]) -> str:
    head = ["| goal | | measured (least to most) | reached |", "|---|---|---|---|"]
    return "\n".join([*head, *(goal.row() for goal in found)])
