"""Cells of a table: simulations by the dozen, several at a time, each in a folder of its own.

A cell that was broken off goes on from its last round and a finished one is only read, so that a table can be
made over days. How many run at once changes no result.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path

from fedmpq.data.dataset import DataError
from fedmpq.lab import simulation
from fedmpq.lab.checkpoint import FILE_NAME, CheckpointError
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.partition import PartitionError
from fedmpq.lab.pool import WorkerError
from fedmpq.lab.round_log import LOG_NAME, RoundResult, read_log
from fedmpq.system.machine import physical_memory
from fedmpq.training.engine import EngineError, TrainingError

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0
# A cell's own process and one worker, both with torch and its libraries loaded.
CELL_BYTES = 700_000_000
# Training in float32 keeps and makes about this much for each image, pixel and layer of a batch.
BYTES_PER_PIXEL_AND_LAYER = 200


@dataclass(frozen=True)
class Cell:
    """One experiment and the folder it runs in."""

    experiment: Experiment
    folder: Path

    def results(self) -> list[RoundResult]:
        """The rounds logged so far; an error if the folder holds another experiment."""
        log = self.folder / LOG_NAME
        if not log.is_file():
            return []
        if _logged_experiment(log) != self._comparable(self.experiment):
            raise ExperimentError(
                f"{self.folder} holds a run with other settings; choose another --out or remove it"
            )
        return read_log(self.folder)[: self.experiment.rounds]

    @property
    def rounds_done(self) -> int:
        """Lines of the log, which is cheap enough to ask every half a second."""
        try:
            lines = (self.folder / LOG_NAME).read_bytes().count(b"\n") - 1
        except FileNotFoundError:
            return 0
        return min(max(lines, 0), self.experiment.rounds)

    def finished_results(self) -> list[RoundResult] | None:
        """All rounds, or None while some are missing."""
        results = self.results()
        return results if len(results) == self.experiment.rounds else None

    @staticmethod
    def _comparable(experiment: Experiment) -> Experiment:
        # The data is a file made for this folder, wherever that was when the cell began.
        return replace(experiment, data="")


def _logged_experiment(log: Path) -> Experiment | None:
    with log.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        record = json.loads(first)
        if record.pop("type") != "experiment":
            return None
        return make_experiment({**record, "data": ""})
    except (ValueError, LookupError, AttributeError, TypeError):
        return None  # a log of another version: not this experiment's


@dataclass(frozen=True)
class Ended:
    """A cell that ran to its end, or could not."""

    cell: Cell
    failure: str | None = None


@dataclass(frozen=True)
class Status:
    """Heard twice a second: what is running, and the cell that has just ended, if one has."""

    running: tuple[Cell, ...]
    waiting: int
    ended: Ended | None = None


Watcher = Callable[[Status], None]
_FAILURES = (
    TrainingError,
    EngineError,
    WorkerError,
    ExperimentError,
    PartitionError,
    CheckpointError,
    DataError,
)


@dataclass(frozen=True)
class Slots:
    """How many cells run at once, and how many worker processes all of them have together."""

    cells: int
    workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= self.workers:
            raise ValueError(f"{self.cells} cells with {self.workers} workers; each needs one at least")

    def share(self, free: int, running: int, waiting: int, clients_per_round: int) -> int:
        """Workers of the next cell: an equal share of the free ones among the cells that can start now."""
        starting = max(1, min(waiting, self.cells - running))
        return max(1, min(free // starting, clients_per_round))


def slots_for(cells: int, workers: int, cell_bytes: int, free_bytes: int) -> Slots:
    """Whole cells side by side keep cores busier than clients of one cell, which wait for the slowest of a
    round; only memory, or fewer cells than cores, makes a cell share its round among several workers."""
    by_memory = max(1, free_bytes // cell_bytes)
    return Slots(max(1, min(cells, workers, by_memory)), max(1, min(workers, by_memory)))


def cell_bytes(side: int, layers: int, batch_size: int) -> int:
    """Memory of a cell with one worker, generously."""
    return CELL_BYTES + BYTES_PER_PIXEL_AND_LAYER * batch_size * side * side * layers


def free_memory() -> int:
    """Bytes that new processes may use."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return physical_memory() // 2


def run_cells(cells: Sequence[Cell], slots: Slots, watch: Watcher) -> None:
    """Run all cells to their ends; one that fails is told to the watcher and stops none of the others."""
    waiting, running, free = deque(cells), dict[Future[None], tuple[Cell, int]](), slots.workers
    with _processes(slots.cells) as pool:
        while waiting or running:
            while waiting and free and len(running) < slots.cells:
                cell = waiting.popleft()
                clients = cell.experiment.clients_per_round
                share = slots.share(free, len(running), len(waiting) + 1, clients)
                running[_submit(pool, cell, share)] = (cell, share)
                free -= share
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                cell, share = running.pop(future)
                free += share
                watch(Status(_cells(running), len(waiting), Ended(cell, _failure(future))))
            watch(Status(_cells(running), len(waiting)))


def _cells(running: dict[Future[None], tuple[Cell, int]]) -> tuple[Cell, ...]:
    return tuple(cell for cell, _ in running.values())


def _failure(future: Future[None]) -> str | None:
    """Why a cell did not end well, in one line; what is a bug is raised."""
    try:
        future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a process that ran a cell died, most likely for want of memory; use fewer --workers and start "
            "again: finished rounds are kept"
        ) from None
    except _FAILURES as error:
        return " ".join(str(error).split())
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _submit(pool: ProcessPoolExecutor, cell: Cell, workers: int) -> Future[None]:
    # A new process inherits the mask: Ctrl-C goes to the whole group, and only the parent acts on it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_run_cell, cell, workers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that outlive their cells, for torch takes a second to load."""
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_start)
    try:
        yield pool
    finally:
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(STOP_SECONDS)
            process.kill()


def _start() -> None:
    """Told to end, a process leaves its cell as after an error: workers stopped, temporary files gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _follow_parent()


def _follow_parent() -> None:
    """End with the parent, however that ended; a cell's workers follow in turn."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_cell(cell: Cell, workers: int) -> None:
    """In a process of the pool: from the last checkpoint, or from the start."""
    if (cell.folder / FILE_NAME).exists():
        prepared = simulation.reopen(cell.folder)
    else:
        prepared = simulation.prepare(cell.experiment)
    simulation.run(prepared, cell.folder, workers, _deaf)


def _deaf(_: simulation.Progress) -> None:
    """Whoever watches reads the log."""


class Clock:
    """Time left, from the seconds that logged rounds took.

    A round costs a share for every local epoch. A method that has not run yet is taken to cost the mean of
    those that have.
    """

    def __init__(self, cells: Sequence[Cell], slots: Slots) -> None:
        self._cells = cells
        self._slots = slots
        self._seen: dict[Cell, list[float]] = {}
        self.started = time.monotonic()

    def add(self, cell: Cell, results: Sequence[RoundResult]) -> None:
        """Learn from a finished cell."""
        epochs = cell.experiment.epochs
        self._seen[cell] = [result.seconds / epochs for result in results]

    def seconds_left(self) -> float | None:
        """None before the first cell has ended."""
        if not self._seen:
            return None
        left = 0.0
        for cell in self._cells:
            rounds = cell.experiment.rounds - cell.rounds_done
            left += rounds * cell.experiment.epochs * self._seconds_per_epoch(cell)
        return left / self._slots.cells

    def _seconds_per_epoch(self, cell: Cell) -> float:
        alike = [
            seconds
            for seen, seconds in self._seen.items()
            if _kind(seen.experiment) == _kind(cell.experiment)
        ]
        values = [value for seconds in alike or self._seen.values() for value in seconds]
        return sum(values) / max(1, len(values))


def _kind(experiment: Experiment) -> tuple[str, str, int]:
    """Experiments that cost the same: FedMPQ's ablations do, and so do the quantized methods nearly."""
    method = experiment.method if experiment.trains_floats else "quantized"
    return method, experiment.model, experiment.clients
