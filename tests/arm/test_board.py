"""The aarch64 wheel on emulated boards: the CPUs of a Raspberry Pi 4 and 5, one with i8mm, some with SVE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq import kernels
from tests.test_imports import TORCH_ENGINE
from tools import rounds as round_files
from tools.arm_board import Board
from tools.rounds import HEAVY, Arrays

ROOT = Path(__file__).resolve().parents[2]
ISAS = {
    "cortex-a72": ["neon", "scalar"],
    "cortex-a76": ["neon_dot", "neon", "scalar"],
    "max": ["neon_i8mm", "neon_dot", "neon", "scalar"],
}
# At 128 bits NEON takes fewer instructions.
SCALABLE = {"max-sve128": "neon_i8mm", "max-sve256": "sve", "max-sve512": "sve"}
ROUNDS = ("paper", "carried", "depthwise")

OnBoard = Callable[..., str]
RunOn = Callable[..., str]


def assert_equal(got: Arrays, expected: Arrays) -> None:
    assert got.keys() == expected.keys()
    differing = [name for name in expected if got[name].tobytes() != expected[name].tobytes()]
    assert not differing, f"{len(differing)} of {len(expected)} tensors differ, {differing[0]} first"


def ended(rounds: dict[str, Path], name: str, isa: str, threads: int) -> Arrays:
    """How the round ends on this machine."""
    before = kernels.isa()
    kernels.force_isa(isa)
    try:
        return round_files.train(rounds[name], threads)
    finally:
        kernels.force_isa(before)


def test_the_cpu_gets_its_own_instruction_set(on_board: OnBoard, cpu: str) -> None:
    script = "from fedmpq import kernels; print(kernels.isa(), *kernels.supported_isas())"
    best, *supported = on_board("-c", script).split()
    assert supported == ISAS[cpu]
    assert best == supported[0]


def test_the_library_loads_where_pages_have_16_kib(on_board: OnBoard, cpu: str) -> None:
    script = "import mmap; from fedmpq import kernels; print(mmap.PAGESIZE, kernels.isa())"
    assert on_board("-c", script, QEMU_PAGESIZE="16384").split() == ["16384", ISAS[cpu][0]]


def test_the_client_loads_nothing_heavy(on_board: OnBoard, site: Path) -> None:
    found = (path for room in ("edge_client", "training") for path in (site / "fedmpq" / room).glob("*.py"))
    modules = [
        f"fedmpq.{path.parent.name}.{path.stem}"
        for path in found
        if f"{path.parent.name}/{path.name}" not in TORCH_ENGINE
    ]
    assert {"fedmpq.training.native_engine", "fedmpq.edge_client.session"} <= set(modules)
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), sys.modules['fedmpq.training.engine'].__file__)"
    )
    loaded, _, path = on_board("-c", script).strip().partition(" ")
    assert loaded == "[]"
    assert Path(path).is_relative_to(site)


def test_kernels_pass_their_tests(on_board: OnBoard, board: Board, cpu: str) -> None:
    script = ROOT / "tests" / "arm" / "pytest_on_board.py"
    # What the sanitizers watch is a program of the host's, and what x86 has is the host's too.
    out = on_board(script, board.launcher(cpu), "-q", "-k", "not sanitizers and not x86", "tests/kernels")
    assert " passed" in out
    assert "skipped" not in out


@pytest.mark.parametrize(("cpu", "best"), SCALABLE.items())
def test_registers_of_any_length_multiply_exactly(run_on: RunOn, board: Board, cpu: str, best: str) -> None:
    """Of 128 bits, of 256 and of 512, which hold a fourth of a block of columns, half of it and all of it."""
    script = "from fedmpq import kernels; print(kernels.isa(), *kernels.supported_isas())"
    assert run_on(cpu, "-c", script).split() == [best, "sve", *ISAS["max"]]
    pytest_there = ROOT / "tests" / "arm" / "pytest_on_board.py"
    chosen = "sve and (tiles or gradients or input_errors)"
    out = run_on(
        cpu, pytest_there, board.launcher(cpu), "-q", "-k", chosen, "tests/kernels/test_training_conv.py"
    )
    assert "3 passed" in out


def test_a_round_by_sve_ends_as_it_does_here(run_on: RunOn, rounds: dict[str, Path], tmp_path: Path) -> None:
    result = tmp_path / "result.npz"
    report = json.loads(
        run_on("max-sve128", "-m", "tools.rounds", rounds["carried"], result, 2, FEDMPQ_ISA="sve")
    )
    assert report["isa"] == "sve"
    with np.load(result) as stored:
        assert_equal(dict(stored), ended(rounds, "carried", kernels.isa(), 1))


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_ends_the_same_on_every_instruction_set_here(rounds: dict[str, Path], name: str) -> None:
    expected = ended(rounds, name, "scalar", 1)
    for isa in kernels.supported_isas():
        for threads in (1, 2):
            assert_equal(ended(rounds, name, isa, threads), expected)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_on_the_board_ends_as_it_does_here(
    on_board: OnBoard, cpu: str, rounds: dict[str, Path], tmp_path: Path, name: str
) -> None:
    result = tmp_path / "result.npz"
    report = json.loads(on_board("-m", "tools.rounds", rounds[name], result, 2))
    assert report["isa"] == ISAS[cpu][0]
    assert report["heavy"] == []
    with np.load(result) as stored:
        assert_equal(dict(stored), ended(rounds, name, kernels.isa(), 1))


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_changes_codes_and_side_tensors(rounds: dict[str, Path], name: str) -> None:
    """Else the comparisons above would compare nothing."""
    before, after = round_files.load(rounds[name]).assignment, round_files.train(rounds[name], 1)
    changed = [
        layer for layer, packed in before.layers.items() if differ(after[f"planes/{layer}"], packed.planes)
    ]
    assert len(changed) >= len(before.layers) / 2
    assert all(differ(after[f"side/{side}"], tensor) for side, tensor in before.side.items())


def differ(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return not np.array_equal(left, right)
