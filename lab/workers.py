"""Worker processes of a simulation: each trains clients and evaluates models, one torch thread each.

A result depends on its task alone, never on which worker did it or how many there are.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Calibration
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.methods import Method, Probe, Sent, Uploaded, make_method
from fedmpq.model.graph import Graph
from fedmpq.training.engine import TrainingError

S = TypeVar("S")
T = TypeVar("T")


class WorkerError(RuntimeError):
    """A worker process that died."""


@dataclass(frozen=True)
class _Setup:
    """What a worker needs to know once; the images come as memory maps, shared by all workers."""

    experiment: Experiment
    graph: bytes
    class_names: tuple[str, ...]
    folder: str
    parts: tuple[NDArray[np.int64], ...]


class _Worker:
    """The state of one worker process."""

    def __init__(self, setup: _Setup) -> None:
        import torch

        torch.set_num_threads(1)
        graph = Graph.from_bytes(setup.graph)
        self.method: Method = make_method(setup.experiment, graph, len(setup.class_names))
        self.train_data = _load(setup, "train")
        self.test_data = _load(setup, "test")
        self.parts = setup.parts

    def train(self, assignment: Sent) -> Uploaded:
        data = self.train_data.subset(self.parts[assignment.client])
        try:
            return self.method.train(assignment, data)
        except TrainingError as error:
            raise TrainingError(f"client {assignment.client}, round {assignment.round}: {error}") from None

    def measure(self, assignment: Sent) -> Calibration:
        return self.method.measure(assignment, self.train_data.subset(self.parts[assignment.client]))

    def accuracy(self, probe: Probe) -> float:
        predicted = self.method.logits(probe, self.test_data.images).argmax(axis=1)
        return float(np.mean(predicted == self.test_data.labels))


_worker: _Worker | Exception | None = None


def _start(setup: _Setup) -> None:
    global _worker
    # Ctrl-C goes to the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A model that diverges overflows on its way there; what it comes to is checked, and told once.
    np.seterr(over="ignore", invalid="ignore")
    threading.Thread(target=_follow_parent, args=(setup.folder,), daemon=True).start()
    try:
        _worker = _Worker(setup)
    except Exception as error:
        # The pool would tell of a worker that died, and not of what: keep it for the first task.
        _worker = error


def _follow_parent(folder: str) -> None:
    """End with the parent, however that ended, and clear away what it can no longer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _train(assignment: Sent) -> Uploaded:
    return _ready().train(assignment)


def _measure(assignment: Sent) -> Calibration:
    return _ready().measure(assignment)


def _accuracy(probe: Probe) -> float:
    return _ready().accuracy(probe)


def _ready() -> _Worker:
    assert _worker is not None
    if isinstance(_worker, Exception):
        raise _worker
    return _worker


class WorkerPool:
    """Runs clients and evaluations in parallel; a context manager."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Sequence[NDArray[np.int64]],
        workers: int,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedmpq-")
        _save(Path(self._folder.name), "train", train)
        _save(Path(self._folder.name), "test", test)
        setup = _Setup(experiment, graph.to_bytes(), train.class_names, self._folder.name, tuple(parts))
        self._pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(setup,)
        )

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        processes = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        self._folder.cleanup()

    def train(self, assignments: Iterable[Sent]) -> Iterator[Uploaded]:
        """Updates as they are ready."""
        with _worker_errors():
            for future in as_completed(self._submit(_train, assignments)):
                yield future.result()

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        """The statistics that each client measures, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_measure, assignments)]

    def accuracies(self, probes: Iterable[Probe]) -> list[float]:
        """The test accuracy of each probe, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_accuracy, probes)]

    def _submit(self, function: Callable[[S], T], tasks: Iterable[S]) -> list[Future[T]]:
        # Processes start here, when they are first needed. They inherit the mask, so that Ctrl-C cannot reach
        # one before it has said that it ignores it.
        with _blocked(signal.SIGINT):
            return [self._pool.submit(function, task) for task in tasks]


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _save(folder: Path, split: str, data: Dataset) -> None:
    np.save(folder / f"{split}-images.npy", data.images)
    np.save(folder / f"{split}-labels.npy", data.labels)


def _load(setup: _Setup, split: str) -> Dataset:
    images = np.load(Path(setup.folder) / f"{split}-images.npy", mmap_mode="r")
    labels = np.load(Path(setup.folder) / f"{split}-labels.npy", mmap_mode="r")
    return Dataset(images, labels, setup.class_names)
