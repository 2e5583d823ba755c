"""A real server without TLS on loopback, and stand-ins in the test's process that speak the protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.cli.main import main
from tests.server.stand_in import StandIn
from tools.programs import FEDMPQ, Program, free_port, wait_for_port

CONFIG: dict[str, Any] = {
    "name": "crowd",
    "model": "resnet20",
    "test_data": "test.npz",
    "seed": 3,
}
TEST_IMAGES = 200


@dataclass(frozen=True)
class Served:
    program: Program
    address: str
    state: Path
    token: str

    def stand_in(self, number: int, **changes: Any) -> StandIn:
        return StandIn(self.address, f"client-{number:03}", **changes)


@contextmanager
def served(folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> Iterator[Served]:
    """The server with a run of these settings; it stays up when the run has ended."""
    folder.mkdir(exist_ok=True)
    state, config = folder / "state", folder / "run.toml"
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (TEST_IMAGES, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "test.npz", x_test=images, y_test=np.arange(TEST_IMAGES) % 10)
    config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in {**CONFIG, **settings}.items()))
    port = free_port()
    address = f"127.0.0.1:{port}"
    words = ["server", str(config), "--state", str(state), "--listen", address]
    program = Program([*FEDMPQ, *words], folder / "server.log")
    try:
        wait_for_port(port, program)
        capsys.readouterr()
        assert main(["server", "token", "--many", "--state", str(state)]) == 0
        token = next(word for word in capsys.readouterr().out.split() if word.startswith("fmq_"))
        yield Served(program, address, state, token)
    finally:
        program.kill()
