"""How many instructions the ARM kernels and exported models save. Counts repeat: a loss shows at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import arm_inference
from fedmpq.exchange.messages import TrainingPlan
from tools import arm_instructions, rounds
from tools.arm_board import Board, BoardError

SAVED = {"cortex-a72": 4, "cortex-a76": 8, "max": 8}


@pytest.fixture(scope="module")
def counting(board: Board, tmp_path_factory: pytest.TempPathFactory) -> arm_instructions.Counting:
    return arm_instructions.Counting(board, tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of a network with the layers of ResNet-20, one block each."""
    path = tmp_path_factory.mktemp("step") / "round.npz"
    rounds.make(path, "resnet8", (3, 32, 32), 2, TrainingPlan(epochs=1, batch_size=2))
    return path


@pytest.mark.parametrize(("cpu", "factor"), SAVED.items())
def test_convolutions_take_a_fraction_of_the_instructions(
    counting: arm_instructions.Counting, step: Path, cpu: str, factor: int
) -> None:
    scalar = counting.step(step, cpu, "scalar")
    own = counting.step(step, cpu, arm_instructions.OWN_ISA[cpu])
    assert scalar.keys() == own.keys()
    assert arm_instructions.convolutions(scalar) > 10_000_000
    assert arm_instructions.convolutions(scalar) >= factor * arm_instructions.convolutions(own)


def test_products_of_matrices_take_fewer_instructions_and_longer_registers_fewer_still(
    counting: arm_instructions.Counting, step: Path
) -> None:
    boards = (("max", "neon_dot"), ("max", "neon_i8mm"), ("max-sve256", "sve"))
    rows, matrices, long = (
        arm_instructions.convolutions(counting.step(step, cpu, isa)) for cpu, isa in boards
    )
    assert matrices < rows
    assert matrices >= 1.3 * long


def test_an_exported_model_takes_fewer_instructions_than_fp32(
    counting: arm_instructions.Counting, tmp_path: Path
) -> None:
    arm_inference.write_models("resnet8", 4, tmp_path)
    counts = counting.inference(tmp_path, "cortex-a76")
    assert counts["fp32"] >= 1.8 * counts["exported"]
    assert counts["static int8"] >= 0.95 * counts["exported"]


def test_counts_are_differences_between_marks() -> None:
    marks = "64 100\n65 130\n64 200\n65 201\n64 300\n65 305\n"
    assert arm_instructions.counted(["a", "b", "a"], marks) == {"a": 35, "b": 1}


@pytest.mark.parametrize("marks", ["", "64 1\n", "64 1\n64 2\n", "64 1\n65 2\n64 3\n65 4\n"])
def test_marks_that_do_not_fit_the_calls_are_refused(marks: str) -> None:
    with pytest.raises(BoardError, match=r"1 calls left \d marks"):
        arm_instructions.counted(["a"], marks)
