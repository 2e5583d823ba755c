"""An emulated board with the aarch64 wheel installed, and the rounds that it trains."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fedmpq.exchange.messages import TrainingPlan
from tools import arm_board, wheels
from tools import rounds as round_files
from tools.arm_board import Board

ROOT = Path(__file__).resolve().parents[2]

OnBoard = Callable[..., str]
RunOn = Callable[..., str]


@pytest.fixture(scope="session")
def board() -> Board:
    try:
        return arm_board.make()
    except arm_board.NotDebianError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def site(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the aarch64 wheel as pip installs it for the board."""
    folder = tmp_path_factory.mktemp("site")
    wheels.install([str(wheels.build("aarch64")), "--no-deps"], "aarch64", board.python_version(), folder)
    return folder


@pytest.fixture(scope="session", params=arm_board.CPUS)
def cpu(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def on_board(run_on: RunOn, cpu: str) -> OnBoard:
    """`run_on` with each of the CPUs that all tests of boards run on."""
    return partial(run_on, cpu)


@pytest.fixture(scope="session")
def run_on(board: Board, site: Path) -> RunOn:
    """Runs a CPU's Python with these arguments, and these changes to the environment; its output."""

    def run(cpu: str, *arguments: str | Path, **changed: str) -> str:
        command = [str(board.launcher(cpu)), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", **changed}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"on the {cpu}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Few batches each: a residual network by both update rules, and one with depthwise layers and ReLU6."""
    paper = TrainingPlan(epochs=1, batch_size=48, pad=1, flip=True)
    carried = TrainingPlan(epochs=1, batch_size=48, update="carried", momentum_bits=8)
    folder = tmp_path_factory.mktemp("rounds")
    files = {name: folder / f"{name}.npz" for name in ("paper", "carried", "depthwise")}
    round_files.make(files["paper"], "digits_cnn", (1, 8, 8), 100, paper)
    round_files.make(files["carried"], "digits_cnn", (1, 8, 8), 100, carried)
    round_files.make(files["depthwise"], "mobilenet_v2", (3, 32, 32), 4, carried)
    return files
