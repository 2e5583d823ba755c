"""What the loop over the runs and the round it has open work with, and how either is told to end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fedmpq.exchange.messages import Phase
from fedmpq.server.blobs import Blobs, Outgoing
from fedmpq.server.connections import Connections
from fedmpq.server.read_ahead import ReadAhead
from fedmpq.server.round_facts import PHASE_SECONDS
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED, Commit, Run
from fedmpq.system.logs import say

T = TypeVar("T")
log = logging.getLogger("fedmpq.server")

FIRST_RETRY_SECONDS = 0.5
MOST_RETRY_SECONDS = 30.0

CHECKS_AT_ONCE = 2
"""Uploads that are parsed at the same time: each needs memory for a model."""


class Stopped(Exception):
    """The server is stopping."""


class Ended(Exception):
    """The run at work is over: finished or aborted."""


@dataclass
class Tally:
    """Counts since the server started, for the metrics."""

    rounds: int = 0
    calibrations: int = 0
    updates: int = 0
    rejected: int = 0
    cut: int = 0
    extended: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    round_seconds: float = 0.0
    phase_seconds: Counter[str] = field(default_factory=Counter)
    """Seconds of merged rounds by `method.history.PHASES`."""

    def add(self, phase: Phase, commit: Commit, seconds: float, before: Mapping[str, Any]) -> None:
        """A merge that took so long, with what was known of its round before."""
        self.rounds += phase == "training"
        self.calibrations += phase == "calibration"
        self.bytes_up += sum(commit.bytes_up.values())
        self.bytes_down += sum(commit.bytes_down.values())
        self.round_seconds += seconds
        self.phase_seconds.update(commit.metrics.get(PHASE_SECONDS, {}))
        self.phase_seconds.subtract(before.get(PHASE_SECONDS, {}))


class Workers:
    """Threads for whole models, apart from the others: the allocator keeps, for each thread, what its largest
    piece of work needed."""

    def __init__(self) -> None:
        self._checkers = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="check")
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweep")

    async def check(self, work: Callable[..., T], *arguments: Any) -> T:
        """A few at a time."""
        return await _run(self._checkers, work, *arguments)

    async def merge(self, work: Callable[..., T], *arguments: Any) -> T:
        """One piece at a time."""
        return await _run(self._merger, work, *arguments)

    def sweep(self, work: Callable[[], None]) -> Future[None]:
        """Beside all else, from any thread."""
        return self._sweeper.submit(work)

    def shutdown(self) -> None:
        self._checkers.shutdown()
        self._merger.shutdown()
        self._sweeper.shutdown()


async def _run(threads: Executor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *arguments))


@dataclass
class Resources:
    store: Store
    blobs: Blobs
    outgoing: Outgoing
    connections: Connections
    clock: Callable[[], float] = time.time
    """The wall clock: for what is stored, and never for how long something takes, because it may jump."""
    steady: Callable[[], float] = time.monotonic
    workers: Workers = field(default_factory=Workers)
    tally: Tally = field(default_factory=Tally)
    stopping: bool = False
    waiting_since: float = field(default=0.0, init=False)
    """When `waiting_for` became what it is."""
    _waiting_for: str = field(default="", init=False)
    _sweeping: Future[None] | None = field(default=None, init=False)

    @property
    def waiting_for(self) -> str:
        """What the run at work waits for, for the operator's eyes."""
        return self._waiting_for

    @waiting_for.setter
    def waiting_for(self, words: str) -> None:
        if words != self._waiting_for:
            self._waiting_for, self.waiting_since = words, self.clock()

    def check_stop(self) -> None:
        if self.stopping:
            raise Stopped

    async def persist(self, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` gives in a thread, tried as often as it takes while the store cannot be reached."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                return await asyncio.to_thread(work, *arguments)
            except OSError as error:
                delay = await self.wait_out(error, delay)

    async def wait_out(self, error: OSError, delay: float) -> float:
        """Wait so many seconds after a failure; the seconds to wait after the next one."""
        self.waiting_for = str(error)
        if not isinstance(error, StoreFailed):
            # The store itself tells of its failures.
            say(log, "the store failed; trying again", level=logging.ERROR, error=str(error))
        end = self.steady() + delay
        while (left := end - self.steady()) > 0:
            seen = self.connections.changed.count
            self.check_stop()
            await self.connections.changed.wait(seen, left)
        return min(2 * delay, MOST_RETRY_SECONDS)

    def check_run(self, run: Run) -> None:
        """Before every step of a run: it may be over, or the server be stopping."""
        self.check_stop()
        if run.state in ENDED:
            raise Ended

    def sweep(self, *, wait: bool = True) -> None:
        """Delete merged answers, models that are kept no longer, and the round's outgoing payloads. Who does
        not wait goes on while blobs are deleted: no round is open, and `put_answers` waits."""
        if isinstance(self.blobs, ReadAhead):
            # No round is open, so nothing that a front-end has just put is among them.
            self.blobs.delete_later(self.store.recorded_blobs() - self.store.blobs_in_use())
        elif wait:
            self.sweep_blobs()
        else:
            self._sweeping = self.workers.sweep(self._sweep_if_it_can)
        self.outgoing.keep_only(())

    def freeing(self, commit: Callable[[], T]) -> T:
        """What the commit gives; the blobs that no fact refers to any more after it are deleted, and no
        others: of an answer that is on its way the blob is there before its fact is."""
        with self.blobs.lock:
            before = self.store.blobs_in_use()
            given = commit()
            self._delete(before - self.store.blobs_in_use())
        return given

    def _sweep_if_it_can(self) -> None:
        try:
            self.sweep_blobs()
        except OSError as error:
            # The next sweep finds them.
            log.warning("payloads that are needed no more stay for now: %s", error)

    def put_answers(self, items: Sequence[bytes]) -> list[bytes]:
        """The names of answers' blobs, durable now. No fact refers to them yet, so none may be put while
        blobs are swept."""
        if self._sweeping is not None:
            self._sweeping.result()
        return self.blobs.put_all(items)

    def sweep_blobs(self) -> None:
        """Delete the blobs that this store has recorded and that no fact of it refers to; no others."""
        with self.blobs.lock:
            self._delete(self.store.recorded_blobs() - self.store.blobs_in_use())

    def _delete(self, gone: set[bytes]) -> None:
        for name in gone:
            self.blobs.delete(name)
        if gone:
            self.store.forget_blobs(gone)
