"""A real `fedmpq server` without TLS on loopback whose rounds take no time: a tiny model and no test data.

Its clients are stand-ins in the test's process that do not train; they write down what they are told.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fedmpq.server.state_folder import StateFolder
from tests.history.facts import First, first_in
from tests.history.recording import Recorder
from tests.server.stand_in import StandIn
from tools.programs import FEDMPQ, Program, free_port, wait_for_port

CONFIG: dict[str, Any] = {
    "name": "fast",
    "model": "tests.tiny_model:tiny",
    "image": [8, 8, 1],
    "classes": 3,
    "input_scale": 0.015625,
    "input_zero_point": 128,
    "seed": 5,
}


@dataclass
class FastServer:
    """A folder with the server's state and its clients' histories; leaving the context ends the server."""

    folder: Path
    settings: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the test's own, for the server and every command on its state."""
    database: str | None = None
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.state = StateFolder(self.folder / "state")
        self.state.path.mkdir(parents=True, mode=0o700)
        self.config = self.folder / "run.toml"
        words = {**CONFIG, **self.settings}
        self.config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in words.items()))
        self.program: Program | None = None

    def __enter__(self) -> FastServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.program is not None:
            self.program.kill()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def histories(self) -> Path:
        return self.folder / "histories"

    def command(self, *words: str) -> str:
        """What `fedmpq WORDS... --state STATE` prints."""
        done = subprocess.run(
            [*FEDMPQ, *words, "--state", str(self.state.path)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def token(self) -> str:
        """One for any number of clients."""
        made = self.command("server", "token", "--many")
        return next(word for word in made.split() if word.startswith("fmq_"))

    def start(self) -> First:
        """Starts the server; what its run begins with. No client may be there yet."""
        words = ["server", str(self.config), "--state", str(self.state.path), "--listen", self.address]
        words += ["--database", self.database] if self.database is not None else []
        self.program = Program([*FEDMPQ, *words], self.folder / "server.log", self.environment)
        self.wait()
        return first_in(self.state)

    def wait(self) -> None:
        """Until it listens."""
        assert self.program is not None
        wait_for_port(self.port, self.program)

    def recorder(self, name: str) -> Recorder:
        return Recorder(self.histories / f"{name}.jsonl")

    def stand_in(self, name: str, **facts: Any) -> StandIn:
        return StandIn(self.address, name, recorder=self.recorder(name), **facts)
