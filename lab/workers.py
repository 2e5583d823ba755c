"""Worker processes of a simulation: each trains clients and evaluates models, one torch thread each.

A result depends on its task alone, never on which worker did it or how many there are.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.data.tasks import anomalies
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update, unpack_layers
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.first_model import seeded_module
from fedmpq.lab.probes import IntegerProbe, Probe
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score, score_of
from fedmpq.system.machine import available_cores
from fedmpq.training.engine import TrainingError
from fedmpq.training.integer_trainer import IntegerTrainer

if TYPE_CHECKING:
    from torch import nn

    from fedmpq.training.float_trainer import FloatTrainer

Sent = TypeVar("Sent", bound=Assignment | FloatAssignment)
Returned = TypeVar("Returned", bound=Update | FloatUpdate)
S = TypeVar("S")
T = TypeVar("T")


class WorkerError(RuntimeError):
    """A worker process that died."""


@dataclass(frozen=True)
class _Setup:
    """What a worker needs to know once; the images come as memory maps, shared by all workers."""

    experiment: Experiment
    graph: bytes
    module: nn.Module | None
    """The network to train in full precision, unless the experiment names it."""
    class_names: tuple[str, ...]
    folder: str
    parts: tuple[NDArray[np.int64], ...]


class Worker:
    """Trains clients and evaluates models, one task after the other."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Sequence[NDArray[np.int64]],
        module: nn.Module | None = None,
    ) -> None:
        self._experiment = experiment
        self._graph = graph
        self._train, self._test, self._parts = train, test, parts
        self._module = module
        self._integers = IntegerTrainer(graph, experiment.engine)

    @cached_property
    def _floats(self) -> FloatTrainer:
        from fedmpq.training.float_trainer import FloatTrainer

        outputs, channels = self._graph.shapes[self._graph.output][0], self._graph.input.channels
        return FloatTrainer(self._graph, self._module or seeded_module(self._experiment, outputs, channels))

    def train(self, assignment: Assignment | FloatAssignment) -> Update | FloatUpdate:
        data = self._train.subset(self._parts[assignment.client])
        try:
            if isinstance(assignment, FloatAssignment):
                return self._floats.train(assignment, data)
            return self._integers.train(assignment, data)
        except TrainingError as error:
            raise TrainingError(f"client {assignment.client}, round {assignment.round}: {error}") from None

    def measure(self, assignment: Assignment | FloatAssignment) -> Calibration:
        data = self._train.subset(self._parts[assignment.client])
        if isinstance(assignment, FloatAssignment):
            return self._floats.measure(assignment, data)
        return self._integers.measure(assignment, data)

    def score(self, probe: Probe) -> Score:
        test = self._test
        given = test.labels if test.targets is None else test.targets
        return score_of(self._graph, self._logits(probe), test.images, given, anomalies(test))

    def _logits(self, probe: Probe) -> NDArray[np.float32]:
        from fedmpq.training.torch_engine import full_precision_logits

        graph, images = self._graph, self._test.images
        if isinstance(probe, IntegerProbe):
            return DeployedModel(graph, unpack_layers(graph, probe.layers), probe.side).logits(images)
        if self._experiment.trains_floats:
            return self._floats.logits(probe.weights, probe.side, images)
        return full_precision_logits(graph, probe.weights, probe.side, images)


_worker: Worker | Exception | None = None


def _start(setup: _Setup) -> None:
    global _worker
    # Ctrl-C goes to the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A model that diverges overflows on its way there; what it comes to is checked, and told once.
    np.seterr(over="ignore", invalid="ignore")
    threading.Thread(target=_follow_parent, args=(setup.folder,), daemon=True).start()
    try:
        _worker = _made(setup)
    except Exception as error:
        # The pool would tell of a worker that died, and not of what: keep it for the first task.
        _worker = error


def _made(setup: _Setup) -> Worker:
    import torch

    torch.set_num_threads(1)
    graph = Graph.from_bytes(setup.graph)
    train, test = _load(setup, "train"), _load(setup, "test")
    return Worker(setup.experiment, graph, train, test, setup.parts, setup.module)


def _follow_parent(folder: str) -> None:
    """End with the parent, however that ended, and clear away what it can no longer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _train(assignment: Assignment | FloatAssignment) -> Update | FloatUpdate:
    return _ready().train(assignment)


def _measure(assignment: Assignment | FloatAssignment) -> Calibration:
    return _ready().measure(assignment)


def _score(probe: Probe) -> Score:
    return _ready().score(probe)


def _ready() -> Worker:
    assert _worker is not None
    if isinstance(_worker, Exception):
        raise _worker
    return _worker


class WorkerPool(Generic[Sent, Returned]):
    """Runs clients and evaluations in parallel; a context manager."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Sequence[NDArray[np.int64]],
        workers: int,
        module: nn.Module | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedmpq-")
        _save(Path(self._folder.name), "train", train)
        _save(Path(self._folder.name), "test", test)
        setup = _Setup(
            experiment, graph.to_bytes(), module, train.class_names, self._folder.name, tuple(parts)
        )
        self._pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(setup,)
        )

    def __enter__(self) -> WorkerPool[Sent, Returned]:
        return self

    def __exit__(self, *_: object) -> None:
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
            for future in as_completed(self._submit(_train, assignments)):
                # Whoever is sent codes gives back codes, and floats floats; a process boundary has no types.
                yield cast("Returned", future.result())

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        """The statistics that each client measures, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_measure, assignments)]

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        """How well each probe does on the test data, in order."""
        with _worker_errors():
            return [future.result() for future in self._submit(_score, probes)]

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
