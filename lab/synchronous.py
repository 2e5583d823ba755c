"""Rounds in a simulation: the clients of a round all train the same model, and it ends with the slowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from fedmpq.lab.boards import VirtualClock
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.fleet import chosen, knowing
from fedmpq.lab.gathered import Flights, Gathered
from fedmpq.lab.pool import Parts, Pool, Returned, Sent
from fedmpq.lab.round_parts import RoundParts
from fedmpq.method.protocol import Method
from fedmpq.method.state import GlobalModel


class Synchronous(Generic[Sent, Returned]):
    """Gathers the changes of one round after the other."""

    def __init__(
        self,
        method: Method[Sent, Returned],
        experiment: Experiment,
        parts: Parts,
        pool: Pool[Sent, Returned],
        clock: VirtualClock | None,
        now: int,
    ) -> None:
        self._method, self._experiment, self._parts, self._pool = method, experiment, parts, pool
        self._clock = clock
        self._now = now

    @property
    def now(self) -> int:
        return self._now

    def flights(self) -> Flights | None:
        return None

    def gather(self, model: GlobalModel, tell: Callable[[int, int], None]) -> Gathered:
        """All clients that were chosen for the round."""
        selected = chosen(self._experiment, self._parts, model)
        model = knowing(model, selected)
        assignments = [self._method.assign(model, client) for client in selected]
        sent, counted = {one.client: one for one in assignments}, RoundParts(self._method.graph)
        updates, found = [], []
        tell(0, len(selected))
        for update in self._pool.train(assignments):
            updates.append(update)
            # While others train.
            found.append(counted.part(sent[update.client], update))
            tell(len(updates), len(selected))
        # They come as they are ready; a sum in that order would differ in its last bits from run to run.
        updates.sort(key=lambda update: update.client)
        assignments.sort(key=lambda assignment: assignment.client)
        parts = tuple(sorted(found, key=lambda part: part.client))
        if self._clock is not None:
            self._now += max(
                self._clock.trained(
                    part.client, model.round + 1, client.samples * sent.plan.epochs, part.bytes_down
                )
                + self._clock.sent(part.client, part.bytes_up)
                for client, sent, part in zip(selected, assignments, parts, strict=True)
            )
        samples = [client.samples for client in selected]
        losses = [(update.loss, count) for update, count in zip(updates, samples, strict=True)]
        return Gathered(selected, parts, losses, lambda: self._method.merge(model, updates))
