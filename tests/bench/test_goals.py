"""The table of goals: what counts as reached, and what is said where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest

from bench.arm_steps import Ratio
from bench.goals import STEP_GOALS, Goal, goals, table
from bench.real_boards import Boards
from bench.scaling import Sample, Scaling
from bench.timing import Spread


def spread(median: float) -> Spread:
    return Spread(median, median * 0.9, median * 1.1)


@pytest.mark.parametrize("at_most", [False, True])
def test_a_goal_is_reached_by_its_median(at_most: bool) -> None:
    below, above = (Goal("it", 2.0, spread(value), "x", at_most) for value in (1.99, 2.01))
    assert (below.reached, above.reached) == (at_most, not at_most)
    assert "**no**" in (above if at_most else below).row()
    assert "| yes |" in (below if at_most else above).row()


def test_what_was_not_measured_is_not_reached_and_says_why() -> None:
    goal = Goal("it", 2.0, None, "x", missing="no emulator")
    assert not goal.reached
    assert "not measured: no emulator" in goal.row()


def test_every_goal_has_its_row() -> None:
    boards = Boards(spread(1.02), spread(0.93), spread(84), spread(70), 44.0, [0.1], [0.2])
    arm = {"cortex-a72": Ratio(1700, 340), "cortex-a76": Ratio(1700, 85)}
    threads = Scaling("resnet20", 64, 2, (Sample(54.0, 1.86), Sample(320.0, 1.2)))
    found = list(
        goals(
            step_facts(),
            threads,
            [inference_facts(model) for model in ("resnet20", "mobilenet_v2")],
            boards,
            arm,
        )
    )
    by_name = {goal.what: goal for goal in found}
    assert len(by_name) == len(found) == 19
    assert not by_name["wire down, x of ResNet-20's 4 bits"].reached
    assert by_name[".onnx, x of ResNet-20's 4 bits"].reached
    # The best instruction set's, not that of the row which was limited to a lesser one.
    assert by_name["training resnet20, batch 64, x torch fp32"].found == spread(3.6)
    assert by_name["two threads against one, ResNet-20, cores that share a cache"].reached
    assert not by_name["two threads against one, ResNet-20, cores that share none"].reached
    assert not by_name["ONNX, mobilenet_v2, batch 1, x static int8"].reached
    assert by_name["ONNX, mobilenet_v2, batch 64, x static int8"].reached
    reached = [goal.reached for goal in found if goal.what.startswith("instructions")]
    assert reached == [False, True]
    assert len(table(found).splitlines()) == 2 + len(found)


def test_without_an_emulator_the_other_goals_stand() -> None:
    boards = Boards(spread(1.02), spread(0.93), spread(84), spread(70), 44.0, [0.1], [0.2])
    models = [inference_facts(model) for model in ("resnet20", "mobilenet_v2")]
    rows = table(list(goals(step_facts(), None, models, boards, "no qemu here")))
    assert rows.count("not measured: no qemu here") == 2
    assert "not measured: no two cores" in rows


def step_facts() -> list[dict[str, Any]]:
    facts = [
        {"model": model, "batch": batch, "threads": 1, "spreads": speedup(3.6)} for model, batch in STEP_GOALS
    ]
    many = {
        "model": "resnet20",
        "batch": 64,
        "threads": 2,
        "spreads": speedup(3.0),
    }
    lesser = {"model": "resnet20", "batch": 64, "threads": 1, "spreads": speedup(1.2)}
    return [*facts, many, lesser]


def speedup(median: float) -> dict[str, Any]:
    return {"speedup_vs_torch_fp32": spread(median).as_dict()}


def inference_facts(model: str) -> dict[str, Any]:
    batches = [
        {
            "batch": batch,
            "speedups": {"executorch": spread(2.5).as_dict()},
            "onnx_ahead_of_static_int8": spread(ahead).as_dict(),
        }
        for batch, ahead in ((1, 0.98), (64, 1.05))
    ]
    return {"model": model, "onnx_size_ratio": 0.89, "batches": batches}
