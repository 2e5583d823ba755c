"""Thousands of fast rounds with everything going wrong in turn; at the end the checker says if W is right.

    python -m tests.soak.soak --rounds 10000

The server is the real one, with a tiny model, and its clients are stand-ins that do not train. At random
rounds the server is killed, its database crashes and comes back, its disk is full for a while, a client lies
until it is shut out, and another one vanishes in the middle of its work. The process's memory, its open
files and what its folder takes on the disk are measured all along. FEDMPQ_TEST_POSTGRES works as for tests;
with --sqlite the database is a file, and cannot crash on its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests import postgres
from tests.fast_server import FastServer
from tests.history.checker import violations
from tests.history.facts import First, read_told, stored_in
from tests.power_loss.journal import build, environment
from tests.soak.clients import Liar, Steady, Vanishing

HONEST = 3
EVERY = 100
"""Rounds from one fault to the next, on average."""
STALLED_SECONDS = 90.0
ROOM = {
    "memory_mb": (1.25, 10.0),
    "descriptors": (1.5, 20.0),
    "files": (1.5, 30.0),
    "disk_kb": (1.5, 100.0),
}
"""How much more the server may take at the end than at the beginning: a factor, and so much beside."""
SETTINGS: dict[str, Any] = {
    "clients_per_round": 2,
    "deadline_seconds": 2.0,
    "calibration_seconds": 5.0,
    "quorum": 0.6,
    "evaluate_every": 25,
}


@dataclass(frozen=True)
class Sample:
    """What the server takes at one moment."""

    round: int
    memory_mb: float
    descriptors: int
    disk_kb: float
    """Of its folder without the database."""
    files: int
    database_kb: float


@dataclass
class Report:
    rounds: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    receipts: int = 0
    rejections: int = 0
    violations: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def grown(self) -> list[str]:
        """What the server takes more of at the end than at the beginning, beyond what chance explains."""
        third = max(1, len(self.samples) // 3)
        early, late = self.samples[:third], self.samples[-third:]
        return [
            f"{what}: up to {_most(late, what):g} at the end, {_most(early, what):g} at the beginning"
            for what, (factor, more) in ROOM.items()
            if _most(late, what) > factor * _most(early, what) + more
        ]


def _most(samples: Sequence[Sample], what: str) -> float:
    return max(float(getattr(sample, what)) for sample in samples)


class Soak:
    """One run of so many rounds."""

    def __init__(
        self,
        server: FastServer,
        rounds: int,
        full: Path,
        database: postgres.Server | None,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._server = server
        self._full = full
        self._database = database
        self._random = random.Random(seed)
        self._round = 0
        self._moved = time.monotonic()
        self._token = ""
        self._is_over = False
        self._is_killed = False
        self._names = Counter[str]()
        self._passing: set[asyncio.Task[str]] = set()
        self.report = Report(rounds)

    def run(self) -> Report:
        first = self._server.start()
        self._token = self._server.token()
        began = time.monotonic()
        asyncio.run(self._conduct())
        self.report.seconds = time.monotonic() - began
        self._check(first)
        return self.report

    async def _conduct(self) -> None:
        clients = [await self._client(Steady, "honest", budget=2.0 + 2 * n) for n in range(HONEST)]
        ended = asyncio.gather(*(client.run() for client in clients))
        faults, watch = asyncio.create_task(self._faults()), asyncio.create_task(self._watch())
        tasks: set[asyncio.Future[Any]] = {ended, faults, watch}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self._is_over = True
        # What has begun to fail comes back first: the checker needs the database.
        for task in (faults, watch):
            await task
        for passing in self._passing:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        assert set(await ended) == {"finished"}
        for client in clients:
            await client.close()

    async def _client(self, kind: type[Steady], name: str, **facts: Any) -> Steady:
        self._names[name] += 1
        client = kind(
            self._server.address,
            f"{name}-{self._names[name]}",
            samples=10 + self._names[name] % 7,
            recorder=self._server.recorder(f"{name}-{self._names[name]}"),
            heard=self._heard,
            **facts,
        )
        await client.enrol_at_last(self._token)
        return client

    def _heard(self, number: int) -> None:
        if number > self._round:
            self._round, self._moved = number, time.monotonic()

    # Faults

    async def _faults(self) -> None:
        """One after the other, as rounds go by."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "killed": self._kill,
            "disk full": self._fill,
            "liar": self._lie,
            "vanished": self._vanish,
        }
        if self._database is not None:
            kinds["database crashed"] = self._crash_database
        counts = Counter[str]()
        waiting: list[str] = []
        every = min(EVERY, self.report.rounds // (len(kinds) + 3))
        while await self._reaches(self._round + self._random.randint(every // 2, 3 * every // 2)):
            # Each kind once before any kind again, so that a short soak has them all.
            waiting = waiting or self._random.sample([*kinds, "killed"], len(kinds) + 1)
            kind = waiting.pop()
            await kinds[kind]()
            counts[kind] += 1
            self.report.faults = dict(counts)

    async def _reaches(self, number: int) -> bool:
        """When the round is there; False: the run has ended before."""
        while self._round < number and not self._is_over:
            await asyncio.sleep(0.02)
        return not self._is_over

    async def _kill(self) -> None:
        program = self._server.program
        assert program is not None
        self._is_killed = True
        for _ in range(self._random.randint(1, 2)):
            program.kill()
            await asyncio.sleep(self._random.uniform(0.0, 0.3))
            program.restart()
            # A second kill comes while it starts.
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
        await asyncio.to_thread(self._server.wait)
        self._is_killed = False

    async def _crash_database(self) -> None:
        assert self._database is not None
        # Here and not in a thread of its own, with whose end the database would end too.
        self._database.restart()

    async def _fill(self) -> None:
        self._full.touch()
        await asyncio.sleep(self._random.uniform(0.2, 2.0))
        self._full.unlink()

    async def _lie(self) -> None:
        self._come(await self._client(Liar, "liar", budget=4.0))

    async def _vanish(self) -> None:
        self._come(await self._client(Vanishing, "vanished", budget=4.0))

    def _come(self, client: Steady) -> None:
        task = asyncio.create_task(client.run())
        self._passing.add(task)

    # Watching

    async def _watch(self) -> None:
        """Measures every so often; a server that ended by itself or stands still is a fault of its own."""
        step = max(10, self.report.rounds // 200)
        measured = 0
        while not self._is_over:
            await asyncio.sleep(0.2)
            if self._server.program is not None and not self._is_killed:
                self._server.program.require_running()
            stalled = time.monotonic() - self._moved
            assert stalled < STALLED_SECONDS, f"nothing moves after round {self._round}: {self._last_words()}"
            if self._round >= measured + step:
                measured = self._round
                self._measure()
                self._tell(f"round {measured} of {self.report.rounds}; {self.report.faults}")

    def _measure(self) -> None:
        program = self._server.program
        assert program is not None
        try:
            process = Path(f"/proc/{program.process.pid}")
            status = (process / "status").read_text()
            descriptors = len(list((process / "fd").iterdir()))
            resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        except (OSError, StopIteration):
            # Just killed.
            return
        sizes = {path: _size(path) for path in self._server.state.path.rglob("*")}
        database = {path: size for path, size in sizes.items() if path.name.startswith("fedmpq.db")}
        rest = sum(sizes.values()) - sum(database.values())
        self.report.samples.append(
            Sample(
                self._round,
                round(int(resident) * 1024 / 1e6, 1),
                descriptors,
                rest / 1e3,
                len(sizes) - len(database),
                sum(database.values()) / 1e3,
            )
        )

    def _last_words(self) -> str:
        assert self._server.program is not None
        return self._server.program.last_words()

    def _check(self, first: First) -> None:
        told, stored = read_told(self._server.histories), stored_in(self._server.state)
        self.report.receipts = len(list(told.of("receipt")))
        self.report.rejections = sum(
            len(each.seats_in("rejected")) for each in stored.rounds if each.address.phase == "training"
        )
        self.report.violations = violations(told, stored, first)
        if (stored.run.state, stored.run.round) != ("finished", self.report.rounds):
            self.report.violations.append(f"the run is {stored.run.state} after round {stored.run.round}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def soak(
    folder: Path,
    rounds: int,
    *,
    sqlite: bool = False,
    seed: int = 0,
    tell: Callable[[str], None] = lambda words: None,
) -> Report:
    """So many rounds in the folder; `tell` hears how it goes."""
    full = folder / "full"
    with ExitStack() as stack:
        database = None if sqlite else stack.enter_context(postgres.running())
        url = None if database is None else stack.enter_context(database.database())
        server = FastServer(folder, {**SETTINGS, "rounds": rounds}, database=url)
        server.environment = environment(build(folder), server.state.path, full=full)
        with server:
            return Soak(server, rounds, full, database, seed, tell).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument(
        "--folder", type=Path, help="where everything stays; default: a folder that goes away"
    )
    words = parser.parse_args()
    with ExitStack() as stack:
        folder = words.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedmpq-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        tell = partial(print, file=sys.stderr, flush=True)
        report = soak(folder, words.rounds, sqlite=words.sqlite, seed=words.seed, tell=tell)
    print(json.dumps({**asdict(report), "grown": report.grown()}, indent=1))
    return 1 if report.violations or report.grown() else 0


if __name__ == "__main__":
    raise SystemExit(main())
