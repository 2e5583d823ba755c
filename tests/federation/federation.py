"""A whole federation on loopback over mutual TLS: the real server and boards, each a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.cli.main import main
from fedmpq.lab.experiment import Experiment, read_toml
from fedmpq.lab.simulation import prepare, run
from fedmpq.method.archive import Tensors
from fedmpq.method.history import History
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.stored_run import StoredRun, read_history, read_stored_run
from tests.history.checker import assert_consistent
from tests.history.facts import First, first_in
from tools.programs import FEDMPQ, PATIENCE, Program, free_port, wait_for_port

Arrays = dict[str, NDArray[np.float32]]

SETTINGS: dict[str, Any] = {
    "model": "digits_cnn",
    "rounds": 3,
    "epochs": 1,
    "batch_size": 16,
    "seed": 7,
}
ALPHA = 5.0
TENSORS = ("weights/", "side/", "average-weights/", "average-side/")
"""How a checkpoint names what is the model's."""


@dataclass
class Federation:
    """Folders and programs of one federation; leaving the context ends every program."""

    folder: Path
    budgets: Sequence[float]
    settings: dict[str, Any] = field(default_factory=dict)
    database: str | None = None
    """URL of a PostgreSQL database; by default SQLite in the state folder."""
    data: str = "digits"
    split: Sequence[str] = ()
    """More options of `fedmpq split`."""
    boards: dict[int, Program] = field(default_factory=dict)
    server: Program | None = None
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.settings = {**SETTINGS, "clients_per_round": len(self.budgets), **self.settings}
        parts = self.folder / "parts"
        words = ["split", "--data", self.data, "--clients", str(len(self.budgets)), "--alpha", str(ALPHA)]
        assert main([*words, *self.split, "--seed", str(self.settings["seed"]), "-o", str(parts)]) == 0
        self.state = self.folder / "state"
        self._first: First | None = None
        self._write_config(parts / "run.toml")
        database = ["--database", self.database] if self.database else []
        assert self._admin("init", "--host", "localhost", *database) == 0
        assert self._admin("bundle", *map(self.name, range(len(self.budgets)))) == 0

    def __enter__(self) -> Federation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self.programs():
            program.kill()

    def programs(self) -> list[Program]:
        return [*self.boards.values(), *([self.server] if self.server else [])]

    @staticmethod
    def name(number: int) -> str:
        return f"board-{number}"

    def start_server(self, *more: str) -> Program:
        server = self.begin_server(*more)
        wait_for_port(self.port, server)
        self.keep_first()
        return server

    def keep_first(self) -> None:
        """For the checker; no board has come yet, so the first model is still there."""
        if self._first is None:
            self._first = first_in(StateFolder(self.state))

    def begin_server(self, *more: str) -> Program:
        """Without waiting for it to listen."""
        words = ["server", str(self.folder / "parts" / "run.toml"), *self._state_words()]
        words += ["--listen", f"127.0.0.1:{self.port}", "--exit-when-done", *more]
        self.server = Program([*FEDMPQ, *words], self.folder / "server.log")
        return self.server

    def board_words(self, number: int, port: int | None = None) -> list[str]:
        return [
            "client",
            *("--server", f"localhost:{port or self.port}"),
            *("--budget", str(self.budgets[number])),
            *("--data", str(self.folder / "parts" / f"client-{number}.npz")),
            *("--bundle", str(self.state / "bundles" / self.name(number))),
            *("--state", str(self.folder / f"board-{number}")),
            *("--threads", "1", "--exit-when-done", "--retry-least", "0.1", "--retry-most", "0.5"),
        ]

    def start_board(self, number: int, port: int | None = None, *more: str) -> Program:
        log = self.folder / f"board-{number}.log"
        recorded = (sys.executable, "-m", "tests.history.recorded_board", str(self._history(number)))
        self.boards[number] = Program([*recorded, *self.board_words(number, port), *more], log)
        return self.boards[number]

    def start_boards(self, port: int | None = None) -> None:
        for number in range(len(self.budgets)):
            self.start_board(number, port)

    def finish(self, patience: float = PATIENCE) -> Arrays:
        """Wait until every program ended well, and its history holds; the tensors of the final model and of
        its average."""
        assert self.server is not None
        assert self.server.wait(patience) == 0, self.server.last_words()
        for board in self.boards.values():
            assert board.wait(60) == 0, board.last_words()
        self.check_history()
        return Tensors.of(self.stored().model).to_arrays()

    def check_history(self) -> None:
        """What the boards were told agrees with what the store has; a board of another kind is not heard."""
        assert self._first is not None
        if all(self._is_recorded(number) for number in self.boards):
            assert_consistent(self.folder / "histories", StateFolder(self.state), self._first)

    def _history(self, number: int) -> Path:
        return self.folder / "histories" / f"board-{number}.jsonl"

    def _is_recorded(self, number: int) -> bool:
        return self._history(number).exists()

    def stored(self) -> StoredRun:
        """The run as the server's folder has it."""
        return read_stored_run(StateFolder(self.state))

    def history(self) -> History:
        """What the run did, as the server's folder has it."""
        return read_history(StateFolder(self.state))[1]

    def simulated(self) -> Arrays:
        """What `fedmpq simulate` ends with, given the same settings, data and budgets."""
        known = {"model", "profile", "rounds", "epochs", "batch_size", "seed", "weights", "method"}
        names = (known | {"data_range", "task"}) & self.settings.keys()
        experiment = Experiment(
            data=self.data,
            budgets=tuple(map(float, self.budgets)),
            alpha=ALPHA,
            participation=self.settings["clients_per_round"] / len(self.budgets),
            **{name: self.settings[name] for name in names},
        )
        folder = self.folder / "simulated"
        run(prepare(experiment), folder, 1, lambda progress: None)
        with np.load(folder / "checkpoint.npz") as archive:
            return {name: archive[name] for name in archive.files if name.startswith(TENSORS)}

    def _admin(self, action: str, *words: str) -> int:
        return main(["server", action, *words, *self._state_words()])

    def _state_words(self) -> list[str]:
        return ["--state", str(self.state)]

    def _write_config(self, path: Path) -> None:
        given = read_toml(path) | self.settings
        settings = {name: value for name, value in given.items() if value is not None}
        path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))


def assert_same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    differing = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not differing, f"{len(differing)} of {len(one)} tensors differ, {differing[0]} first"
