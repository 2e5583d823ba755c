"""Workers of a simulation on Ray: one actor a core, on one machine or on many.

The data are put into Ray's object store once; every node holds one copy in shared memory, which its workers
read in place. What clients are sent is put there once for all clients that are sent the same. A worker has
one task to do and one waiting. The tasks of a worker that is lost, alone or with its node, are done again by
others, with the same result: it depends on the task alone.

Where updates are summed in whole numbers (`train_summed`) they stay with the worker. It adds up what its own
clients have changed and hands that on after every `KEPT` of them, and when no more are left; workers merge
`FAN_IN` such sums into one, and so on, until one is left for the program. With a sum that is lost, its
clients train again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.float_messages import FloatAssignment
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.pool import Parts, Returned, Sent, Trained, WorkerError
from fedmpq.lab.probes import Probe
from fedmpq.lab.ray_cluster import Cluster
from fedmpq.lab.round_sum import RoundSum
from fedmpq.lab.worker import Worker, keep_memory_for, one_thread_each
from fedmpq.method.running_merge import PartialMerge
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score

if TYPE_CHECKING:
    from torch import nn

LOSSES = 4
"""A task that this many workers were lost with is an error: it is most likely what they were lost by."""
FUTILE_LOSSES = 8
"""So many lost workers with no task done in between are an error as well, whatever the tasks."""
START_SECONDS = 300.0
AHEAD = 2
"""Tasks of a worker at a time: one to do and one waiting, so that it need not wait for the next."""
KEPT = 64
"""Clients whose changes a worker sums before it hands them on: so many train again if it is lost. A sum is as
large as the updates of some dozens."""
SUMMED_FROM = 16
"""Clients for each worker, from which on workers sum: an estimate. A sum is as large as dozens of updates,
and with few clients it spares the program less than it costs to move."""
FAN_IN = 4
"""Sums that are merged into one at a time."""
_DONE = pickle.dumps(None)


@dataclass(frozen=True)
class _Setup:
    """What a worker needs to know once."""

    version: str
    experiment: Experiment
    graph: bytes
    module: nn.Module | None
    train: Dataset
    test: Dataset


class RayWorker:
    """The actor. Results go back pickled: so they are copies, and leave no memory of the object store in use
    for as long as the simulation keeps them. Sums stay in the object store, for other actors."""

    def __init__(self) -> None:
        one_thread_each()
        self._worker: Worker | None = None
        self._summing: RoundSum | None = None

    def prepare(self, setup: _Setup) -> int:
        """Make ready for tasks; gives the process's number. It is no part of `__init__`, whose errors Ray
        takes for the loss of the actor."""
        if (here := version("fedmpq")) != setup.version:
            raise WorkerError(
                f"a node of the Ray cluster has fedmpq {here}, and this program {setup.version}; install "
                "the same on all nodes"
            )
        keep_memory_for(setup.experiment)
        self._experiment, self._graph = setup.experiment, Graph.from_bytes(setup.graph)
        self._worker = Worker(setup.experiment, self._graph, setup.train, setup.test, setup.module)
        return os.getpid()

    def train(self, shared: Any, own: dict[str, Any], part: NDArray[np.int64]) -> bytes:
        return pickle.dumps(self._ready.train(replace(shared, **own), part))

    def begin(self, model: GlobalModel) -> None:
        """Of what was summed before, nothing is left."""
        self._summing = RoundSum(self._experiment, self._graph, model)

    def train_summed(self, shared: Any, own: dict[str, Any], part: NDArray[np.int64]) -> bytes:
        update = self._ready.train(replace(shared, **own), part)
        assert isinstance(update, Update)
        return pickle.dumps(self._sum.add(update))

    def hand_on(self) -> tuple[bytes, PartialMerge]:
        return _DONE, self._sum.handed_on()

    def combine(self, *sums: PartialMerge) -> tuple[bytes, PartialMerge]:
        return _DONE, self._sum.combined(sums)

    def calibrate(self, shared: Any, own: dict[str, Any], part: NDArray[np.int64]) -> bytes:
        return pickle.dumps(self._ready.measure(replace(shared, **own), part))

    def score(self, probe: Probe) -> bytes:
        return pickle.dumps(self._ready.score(probe))

    @property
    def _ready(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def _sum(self) -> RoundSum:
        assert self._summing is not None
        return self._summing


@dataclass(eq=False)
class _Task:
    """One call of an actor's method."""

    number: int
    name: str
    """As an error tells of it."""
    method: str
    arguments: tuple[Any, ...]
    model: Any = None
    """A reference to what the round's clients were sent, where their changes are summed; the actor has it
    before its first task of the round."""
    summed: tuple[_Task, ...] = ()
    """Of a sum: whose changes are in it."""
    total: Any = None
    """Of a sum: a reference to it."""
    losses: int = 0

    @property
    def trainings(self) -> tuple[_Task, ...]:
        """What is to be done again if this is lost."""
        return self.summed or (self,)


@dataclass(eq=False)
class _Seat:
    """An actor and what it has to do, oldest first."""

    actor: Any
    starting: Any
    """A reference to its number as a process; None once it is ready."""
    tasks: dict[Any, _Task] = field(default_factory=dict)
    """By the reference to the result."""
    held: list[_Task] = field(default_factory=list)
    """Done, and their changes are summed nowhere but in the actor."""
    model: Any = None
    """Of which it has begun to sum changes."""


class RayPool(Generic[Sent, Returned]):
    """Runs clients and evaluations on a Ray cluster."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Parts,
        workers: int | None = None,
        module: nn.Module | None = None,
        *,
        on: str,
    ) -> None:
        self._parts = parts
        self._cluster = Cluster(on)
        self._ray = self._cluster.ray
        self._seats: list[_Seat] = []
        self._futile_losses = 0
        try:
            setup = _Setup(version("fedmpq"), experiment, graph.to_bytes(), module, train, test)
            self._setup = self._ray.put(setup)
            self._actor = self._ray.remote(num_cpus=1, max_restarts=0)(RayWorker)
            self._seats = [self._start() for _ in range(workers or self._cluster.cores)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        try:
            for seat in self._seats:
                self._ray.kill(seat.actor)
        finally:
            self._seats = []
            self._cluster.close()

    def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
        """Updates as they are ready."""
        for _, _, update in self._done(deque(self._client_tasks("train", assignments))):
            # Whoever is sent codes gives back codes, and floats floats; an object store has no types.
            yield cast("Returned", update)

    def sums(self, clients: int) -> bool:
        """Whether workers sum the changes of so many clients."""
        return clients >= SUMMED_FROM * len(self._seats)

    def train_summed(
        self, model: GlobalModel, assignments: Iterable[Assignment]
    ) -> Iterator[Trained | PartialMerge]:
        """What is told of each client, once it is trained, and at last the sum of all their changes."""
        waiting = deque(self._client_tasks("train_summed", assignments, self._ray.put(model)))
        told, sums = set[int](), list[_Task]()
        while True:
            for seat, task, result in self._done(waiting):
                if task.summed:
                    # What it was made of may go.
                    task.arguments = ()
                    sums.append(task)
                    if len(sums) >= FAN_IN:
                        waiting.appendleft(_combination(sums))
                    continue
                seat.held.append(task)
                # What is trained again has been told.
                if task.number not in told:
                    told.add(task.number)
                    yield result
            if len(sums) > 1:
                waiting.append(_combination(sums))
                continue
            last = sums.pop()
            try:
                total = self._ray.get(last.total)
            except self._ray.exceptions.RayError as error:
                _count_loss(last, error)
                waiting.extend(last.summed)
                continue
            yield total
            return

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        """The statistics that each client measures, in order."""
        return self._in_order(self._client_tasks("calibrate", assignments))

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        """How well each probe does on the test data, in order."""
        tasks = [_Task(number, "an evaluation", "score", (probe,)) for number, probe in enumerate(probes)]
        return self._in_order(tasks)

    def _client_tasks(
        self, method: str, assignments: Iterable[Assignment | FloatAssignment], model: Any = None
    ) -> list[_Task]:
        put: dict[bytes, Any] = {}
        tasks = []
        for number, assignment in enumerate(assignments):
            shared, own = _split(assignment)
            key = hashlib.blake2b(pickle.dumps(shared), digest_size=16).digest()
            if key not in put:
                put[key] = self._ray.put(shared)
            arguments = (put[key], own, self._parts[assignment.client])
            tasks.append(_Task(number, f"client {assignment.client}", method, arguments, model))
        return tasks

    def _in_order(self, tasks: list[_Task]) -> list[Any]:
        done = [(task.number, result) for _, task, result in self._done(deque(tasks))]
        return [result for _, result in sorted(done, key=lambda one: one[0])]

    def _done(self, waiting: deque[_Task]) -> Iterator[tuple[_Seat, _Task, Any]]:
        """By whom each task was done, and its result, as they are ready; more may come to wait meanwhile."""
        try:
            while waiting or self._works:
                self._hand_out(waiting)
                for seat, reference in self._next():
                    yield from self._received(seat, reference, waiting)
        finally:
            # Of a call that was broken off, nothing is to turn up in the next.
            for seat in self._seats:
                seat.tasks.clear()
                seat.held.clear()

    @property
    def _works(self) -> bool:
        return any(seat.tasks or seat.held for seat in self._seats)

    def _next(self) -> list[tuple[_Seat, Any]]:
        """Waits until a worker has done something: a task, or its start."""
        awaited = {
            reference: seat
            for seat in self._seats
            for reference in ([seat.starting] if seat.starting is not None else seat.tasks)
        }
        ready, _ = self._ray.wait(list(awaited), timeout=None if self._works else START_SECONDS)
        if not ready:
            raise WorkerError(
                f"no worker has started on the Ray cluster within {START_SECONDS:g} s; each needs one free "
                f"core of the {self._cluster.cores} there are"
            )
        return [(awaited[reference], reference) for reference in ready]

    def _hand_out(self, waiting: deque[_Task]) -> None:
        """One task to each worker; one more to each while there are enough left to keep all of them busy."""
        seats = [seat for seat in self._seats if seat.starting is None]
        for ahead in range(AHEAD):
            for seat in seats:
                if len(seat.held) + len(seat.tasks) >= KEPT:
                    continue
                if len(seat.tasks) == ahead and len(waiting) > (len(seats) if ahead else 0):
                    self._give(seat, waiting.popleft())
        for seat in seats:
            # Not while it trains: of what comes after this, nobody would know whether it is in the sum.
            if seat.held and not seat.tasks and (len(seat.held) >= KEPT or not waiting):
                self._give(seat, _sum("hand_on", (), seat.held))
                seat.held = []

    def _give(self, seat: _Seat, task: _Task) -> None:
        if task.model is not None and task.model is not seat.model:
            seat.actor.begin.remote(task.model)
            seat.model = task.model
        method = getattr(seat.actor, task.method)
        if task.summed:
            reference, task.total = method.options(num_returns=2).remote(*task.arguments)
        else:
            reference = method.remote(*task.arguments)
        seat.tasks[reference] = task

    def _received(
        self, seat: _Seat, reference: Any, waiting: deque[_Task]
    ) -> Iterator[tuple[_Seat, _Task, Any]]:
        exceptions = self._ray.exceptions
        try:
            result = self._ray.get(reference)
        except exceptions.RayError as error:
            # Raised by the task itself, and of the class that the task raised; unless what it was given, a
            # sum, is lost.
            if isinstance(error, exceptions.RayTaskError) and not isinstance(
                error.cause, exceptions.RayError
            ):
                raise error.cause from None
            self._replace(seat, error, waiting)
            return
        if seat.starting is not None:
            seat.starting = None
            return
        self._futile_losses = 0
        yield seat, seat.tasks.pop(reference), pickle.loads(result)

    def _replace(self, seat: _Seat, error: Exception, waiting: deque[_Task]) -> None:
        """The seat's actor is lost: others do its tasks, and a new one takes its place as soon as it can."""
        self._futile_losses += 1
        left = list(seat.tasks.values())
        if left:
            # The oldest was being done, and may be why; the others had not begun.
            _count_loss(left[0], error)
        if self._futile_losses >= FUTILE_LOSSES:
            raise WorkerError(
                f"{FUTILE_LOSSES} workers on Ray were lost and none has done a task meanwhile: "
                f"{_first_line(error)}"
            )
        again = [training for task in left for training in task.trainings] + seat.held
        waiting.extendleft(reversed(again))
        # It may be cut off and not dead; nobody waits for it any more.
        self._ray.kill(seat.actor)
        self._seats[self._seats.index(seat)] = self._start()

    def _start(self) -> _Seat:
        actor = self._actor.remote()
        return _Seat(actor, actor.prepare.remote(self._setup))


def _count_loss(task: _Task, error: Exception) -> None:
    """A worker, or a sum, is lost; so many are an error."""
    for training in task.trainings:
        training.losses += 1
    if max(training.losses for training in task.trainings) >= LOSSES:
        raise WorkerError(
            f"{LOSSES} workers on Ray were lost with {task.name}, most likely for want of memory: "
            f"use fewer --workers and --resume ({_first_line(error)})"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _sum(method: str, arguments: tuple[Any, ...], summed: Iterable[_Task]) -> _Task:
    clients = tuple(summed)
    name = f"a sum over {len(clients)} clients"
    return _Task(-1, name, method, arguments, clients[0].model, clients)


def _combination(sums: list[_Task]) -> _Task:
    """One sum of all of them, which are then no longer there."""
    task = _sum("combine", tuple(one.total for one in sums), [each for one in sums for each in one.summed])
    sums.clear()
    return task


def _split(assignment: Assignment | FloatAssignment) -> tuple[object, dict[str, Any]]:
    """What clients may share, and what is one client's own."""
    if isinstance(assignment, FloatAssignment):
        own = {"client": assignment.client, "budget": assignment.budget}
        return replace(assignment, client=0, budget=0.0), own
    return replace(assignment, client=0), {"client": assignment.client}
