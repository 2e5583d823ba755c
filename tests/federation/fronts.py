"""A federation with front-ends: a leader and front-ends, each a process, and a balancer before them."""

from __future__ import annotations

import asyncio
import random
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from tests.federation.federation import Arrays, Federation
from tools.programs import FEDMPQ, Program, free_ports, wait_for_port
from tools.tcp_proxy import Proxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Balancer(Proxy):
    """Sends every connection to one of several ports, by chance."""

    def __init__(self, targets: list[int], seed: int) -> None:
        super().__init__(targets[0])
        self._targets = targets
        self._random = random.Random(seed)

    async def _reach(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self._random.choice(self._targets))


class Cable(Proxy):
    """The way to a database's socket, or to a port, which can be taken away for a while."""

    def __init__(self, target: Path | int) -> None:
        super().__init__(target if isinstance(target, int) else 0)
        self._socket = target if isinstance(target, Path) else None
        self.plugged = True

    async def _reach(self) -> Streams:
        if not self.plugged:
            raise ConnectionRefusedError
        if self._socket is not None:
            return await asyncio.open_unix_connection(self._socket)
        return await super()._reach()

    def unplug(self) -> None:
        self.plugged = False
        self.cut()

    def plug(self) -> None:
        self.plugged = True


def socket_of(url: str) -> Path:
    """Of a PostgreSQL that the tests have started."""
    return Path(str(make_url(url).query["host"])) / ".s.PGSQL.5432"


def through(cable: Cable, url: str) -> str:
    """The database by way of the cable."""
    known = make_url(url)
    way = URL.create("postgresql", known.username, host="127.0.0.1", port=cable.port, database=known.database)
    return way.render_as_string(hide_password=False)


@dataclass
class Fronts:
    """The servers of a federation, on one PostgreSQL database; `blobs` is where they have their payloads."""

    federation: Federation
    blobs: str
    count: int = 2
    lease: str = "3"

    def __enter__(self) -> Fronts:
        self._stack = ExitStack()
        self.ports = free_ports(self.count)
        self.leader = self._leader("leader", self.federation.state)
        # They wait for it.
        self.fronts = [self._front(number, port) for number, port in enumerate(self.ports)]
        self.leader.wait_for("leading front-ends")
        self.federation.keep_first()
        for port, front in zip(self.ports, self.fronts, strict=True):
            wait_for_port(port, front)
        self.balancer = self._stack.enter_context(Balancer(self.ports, self.count))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def standby(self) -> Program:
        """Another leader, in a folder of its own."""
        second = self._leader("standby", self._folder("standby"))
        second.wait_for("standing by")
        return second

    def _leader(self, name: str, state: Path) -> Program:
        config = str(self.federation.folder / "parts" / "run.toml")
        return self._start(name, state, config, "--role", "leader", "--exit-when-done")

    def _front(self, number: int, port: int) -> Program:
        name = f"front-{number}"
        return self._start(name, self._folder(name), "--role", "front", "--listen", f"127.0.0.1:{port}")

    def _start(self, name: str, state: Path, *words: str) -> Program:
        shared = ["--state", str(state), "--blobs", self.blobs, "--lease", self.lease]
        command = [*FEDMPQ, "server", *words, *shared]
        log = self.federation.folder / f"{name}.log"
        return self._stack.enter_context(Program(command, log))

    def _folder(self, name: str) -> Path:
        """With the same keys and database as the first leader's."""
        state = self.federation.folder / name
        state.mkdir(mode=0o700)
        shutil.copy(self.federation.state / "database", state / "database")
        shutil.copytree(self.federation.state / "tls", state / "tls")
        return state

    def start_boards(self) -> None:
        self.federation.start_boards(self.balancer.port)

    def finish(self, leader: Program) -> Arrays:
        """When the run has ended well: its model."""
        for board in self.federation.boards.values():
            assert board.wait() == 0, board.last_words()
        self.federation.server = leader
        return self.federation.finish()

    def log(self) -> str:
        return "".join(program.text() for program in [self.leader, *self.fronts])
