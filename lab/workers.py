"""Worker processes of a simulation on this machine: each trains clients and evaluates models."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.pool import Parts, Returned, Sent, WorkerError
from fedmpq.lab.probes import Probe
from fedmpq.lab.worker import Worker, keep_memory_for, one_thread_each
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score
from fedmpq.system.machine import available_cores

if TYPE_CHECKING:
    from torch import nn

S = TypeVar("S")
T = TypeVar("T")
Client = tuple[Assignment | FloatAssignment, NDArray[np.int64]]
"""What a client is sent, and which training samples are its own."""


@dataclass(frozen=True)
class _Setup:
    """What a worker needs to know once; the images come as memory maps, shared by all workers."""

    experiment: Experiment
    graph: bytes
    module: nn.Module | None
    """The network to train in full precision, unless the experiment names it."""
    class_names: tuple[str, ...]
    folder: str


_worker: Worker | Exception | None = None


def _start(setup: _Setup) -> None:
    global _worker
    # Ctrl-C goes to the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread_each()
    keep_memory_for(setup.experiment)
    threading.Thread(target=_follow_parent, args=(setup.folder,), daemon=True).start()
    try:
        _worker = _made(setup)
    except Exception as error:
        # The pool would tell of a worker that died, and not of what: keep it for the first task.
        _worker = error


def _made(setup: _Setup) -> Worker:
    graph = Graph.from_bytes(setup.graph)
    return Worker(setup.experiment, graph, _load(setup, "train"), _load(setup, "test"), setup.module)


def _follow_parent(folder: str) -> None:
    """End with the parent, however that ended, and clear away what it can no longer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _train(client: Client) -> Update | FloatUpdate:
    return _ready().train(*client)


def _measure(client: Client) -> Calibration:
    return _ready().measure(*client)


def _score(probe: Probe) -> Score:
    return _ready().score(probe)


def _ready() -> Worker:
    assert _worker is not None
    if isinstance(_worker, Exception):
        raise _worker
    return _worker


class WorkerPool(Generic[Sent, Returned]):
    """Runs clients and evaluations in processes of this machine."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Parts,
        workers: int | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._parts = parts
        self._folder = tempfile.TemporaryDirectory(prefix="fedmpq-")
        _save(Path(self._folder.name), "train", train)
        _save(Path(self._folder.name), "test", test)
        setup = _Setup(experiment, graph.to_bytes(), module, train.class_names, self._folder.name)
        self._pool = ProcessPoolExecutor(
            workers or default_workers(),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(setup,),
        )

    def close(self) -> None:
        processes = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        self._folder.cleanup()

    def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
        """Updates as they are ready."""
        with _worker_errors():
            for future in as_completed(self._submit(_train, self._clients(assignments))):
                # Whoever is sent codes gives back codes, and floats floats; a process boundary has no types.
                yield cast("Returned", future.result())

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        """The statistics that each client measures, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_measure, self._clients(assignments))]

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        """How well each probe does on the test data, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_score, probes)]

    def _clients(self, assignments: Iterable[Sent]) -> Iterator[Client]:
        return ((assignment, self._parts[assignment.client]) for assignment in assignments)

    def _submit(self, function: Callable[[S], T], tasks: Iterable[S]) -> list[Future[T]]:
        # Processes start here, when they are first needed. They inherit the mask, so that Ctrl-C cannot reach
        # one before it has said that it ignores it.
        with _blocked(signal.SIGINT), _main_hidden():
            return [self._pool.submit(function, task) for task in tasks]


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A spawned process would import the program's main file again, which would start all over in a script
    that calls `fedmpq.simulate` without a guard; workers need nothing of it."""
    names = vars(sys.modules["__main__"])
    hidden = {name: names.pop(name, None) for name in ("__file__", "__spec__")}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update({name: value for name, value in hidden.items() if value is not None})


@contextmanager
def _worker_errors() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died, most likely for want of memory; use fewer --workers and --resume"
        ) from None


def default_workers() -> int:
    """The cores this process may use."""
    return available_cores()


def _save(folder: Path, split: str, data: Dataset) -> None:
    np.save(folder / f"{split}-images.npy", data.images)
    np.save(folder / f"{split}-labels.npy", data.labels)
    if data.targets is not None:
        np.save(folder / f"{split}-targets.npy", data.targets)


def _load(setup: _Setup, split: str) -> Dataset:
    paths = [Path(setup.folder) / f"{split}-{what}.npy" for what in ("images", "labels", "targets")]
    images, labels = (np.load(path, mmap_mode="r") for path in paths[:2])
    targets = np.load(paths[2], mmap_mode="r") if paths[2].exists() else None
    return Dataset(images, labels, setup.class_names, targets=targets)
