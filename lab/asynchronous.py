"""Asynchronous rounds in a simulation: boards fetch work when they are ready, and a merge is due whenever the
server has so many changes (`asynchronous`).

What happens when is decided by the virtual clock alone (`boards`), ties by the clients' numbers; workers
train in any order. At most `clients_per_round` boards are in flight. Whenever there is room, a board is drawn
of those that are idle and have not been sent this version of the model yet: it would train the same again. A
change arrives when its board has fetched, trained and sent it, whatever was merged meanwhile.

All that a run needs to go on after a merge is `Flights`: changes in flight are trained again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from fedmpq.exchange.messages import Assignment, Update, bit_widths
from fedmpq.lab.boards import VirtualClock
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.fleet import knowing, record_of
from fedmpq.lab.gathered import Flight, Flights, Gathered
from fedmpq.lab.pool import Parts, Pool
from fedmpq.lab.round_parts import RoundParts, counted_bytes
from fedmpq.method.history import ClientFacts
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.staleness import Buffering
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.randomness import SERVER, Draws, Purpose


@dataclass
class _Task:
    """A flight with what the board was sent, and what came of it."""

    flight: Flight
    sent: Assignment
    ready: int
    """When it has trained; when its change arrives, once that has been found."""
    part: ClientFacts | None = None
    update: Update | None = None

    def __lt__(self, other: _Task) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, bool, int]:
        # One that has yet to be sent may still arrive at the same moment: it is looked at first.
        return self.ready, self.update is not None, self.flight.client


class Asynchronous:
    """Gathers the changes of one merge after the other."""

    def __init__(
        self,
        method: QuantizedMethod,
        experiment: Experiment,
        parts: Parts,
        pool: Pool[Assignment, Update],
        clock: VirtualClock,
        flights: Flights,
    ) -> None:
        assert method.recipe.buffering is not None
        self._buffering: Buffering = method.recipe.buffering
        self._method, self._experiment, self._pool = method, experiment, pool
        self._parts = parts
        self._clock = clock
        self._now, self._turns = flights.now, flights.turns
        self._versions = {number: method.version(model) for number, model in flights.versions.items()}
        self._tasks = [self._again(flight) for flight in flights.open]
        heapq.heapify(self._tasks)
        self._served: set[int] = set()

    @property
    def now(self) -> int:
        return self._now

    def flights(self) -> Flights:
        """Where the run stands, right after a merge."""
        return Flights(
            self._now,
            self._turns,
            tuple(sorted((task.flight for task in self._tasks), key=_order)),
            {number: version.model for number, version in self._versions.items()},
        )

    def gather(self, model: GlobalModel, tell: Callable[[int, int], None]) -> Gathered:
        """Let boards work until a merge is due; `tell` hears of every change, and how many there will be."""
        self._served = set()
        arrived: list[_Task] = []
        late: list[ClientFacts] = []
        count = self._buffering.count
        tell(0, count)
        while len(arrived) < count:
            model = self._dispatch(model)
            task = self._next_arrival()
            assert task.part is not None
            self._now = task.ready
            task.part = replace(task.part, staleness=model.round - task.flight.version)
            if reason := self._buffering.refusal(task.flight.version, model.round):
                late.append(replace(task.part, outcome="late", reason=reason))
            else:
                arrived.append(task)
                tell(len(arrived), count)
        # The order in which side tensors are summed, and in which all is told.
        arrived.sort(key=lambda task: _order(task.flight))
        return self._gathered(model, arrived, late)

    def _gathered(self, model: GlobalModel, arrived: list[_Task], late: list[ClientFacts]) -> Gathered:
        records = {record.client: record for record in model.clients}
        merged = {task.flight.version for task in arrived}
        versions = {number: version for number, version in self._versions.items() if number in merged}
        used = {task.flight.version for task in self._tasks}
        self._versions = {number: version for number, version in self._versions.items() if number in used}
        parts = [task.part for task in arrived if task.part is not None]

        def merge() -> GlobalModel:
            buffer = self._method.buffer(model, versions)
            for task in arrived:
                assert task.update is not None
                buffer.add(task.update)
            return buffer.finish()

        return Gathered(
            [records[client] for client in sorted({task.flight.client for task in arrived})],
            (*parts, *late),
            [
                (task.update.loss, records[task.flight.client].samples)
                for task in arrived
                if task.update is not None
            ],
            merge,
        )

    def _dispatch(self, model: GlobalModel) -> GlobalModel:
        """Give work to boards that are ready, as far as there is room; the model then knows them."""
        at_work = {task.flight.client for task in self._tasks}
        while len(at_work) < self._experiment.clients_per_round:
            busy = at_work | self._served
            if len(busy) == self._experiment.clients:
                break
            client = drawn_client(self._experiment, self._turns, busy)
            self._turns += 1
            record = record_of(self._experiment, self._parts, model, client)
            model = knowing(model, [record])
            self._give(model, record)
            at_work.add(client)
            self._served.add(client)
        return model

    def _give(self, model: GlobalModel, record: ClientRecord) -> None:
        known = self._versions.get(model.round) or self._method.version(replace(model, average=None))
        sent = self._method.assign(model, record)
        self._versions[model.round] = known.sent_to(record, bit_widths(self._method.graph, sent.layers))
        flight = Flight(record.client, model.round, self._now)
        heapq.heappush(self._tasks, self._task(flight, sent, record))

    def _again(self, flight: Flight) -> _Task:
        """A flight of a run that goes on: its board is sent the same once more."""
        model = self._versions[flight.version].model
        (record,) = (one for one in model.clients if one.client == flight.client)
        return self._task(flight, self._method.assign(model, record), record)

    def _task(self, flight: Flight, sent: Assignment, record: ClientRecord) -> _Task:
        samples, down = record.samples * sent.plan.epochs, counted_bytes(self._method.graph, sent)
        takes = self._clock.trained(flight.client, sent.round, samples, down)
        return _Task(flight, sent, flight.began + takes)

    def _next_arrival(self) -> _Task:
        """The change that arrives next. Those are trained that could, with all others that have yet to be."""
        while self._tasks[0].update is None:
            self._train([task for task in self._tasks if task.update is None])
            heapq.heapify(self._tasks)
        return heapq.heappop(self._tasks)

    def _train(self, tasks: Iterable[_Task]) -> None:
        by_client = {task.flight.client: task for task in tasks}
        for update in self._pool.train([task.sent for task in by_client.values()]):
            task = by_client[update.client]
            task.update, graph = update, self._method.graph
            task.part = RoundParts(graph).part(task.sent, counted_bytes(graph, update))
            task.ready += self._clock.sent(update.client, task.part.bytes_up)


def _order(flight: Flight) -> tuple[int, int]:
    return flight.version, flight.client


def drawn_client(experiment: Experiment, turn: int, busy: set[int]) -> int:
    """One of the clients that are not busy, evenly: numbers are drawn until one is of such a client."""
    draws, step = Draws(experiment.seed, SERVER, turn), 0
    while True:
        # A single uniform number has 24 bits, too few to choose evenly among millions.
        high, low = draws.uniform(2, Purpose.SELECT, step=step).astype(np.float64)
        client = int((high + low * 2.0**-24) * experiment.clients)
        if client not in busy:
            return client
        step += 1
