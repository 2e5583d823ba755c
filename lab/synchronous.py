"""Rounds in a simulation: the clients of a round all train the same model, and it ends with the slowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from fedmpq.lab.boards import VirtualClock
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.fleet import chosen, knowing
from fedmpq.lab.gathered import Flights, Gathered
from fedmpq.lab.merged_updates import merging
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
        found, losses = [], {}
        tell(0, len(selected))
        updates = merging(self._method, self._pool, model, len(selected))
        for trained in updates.train(assignments):
            # While others train.
            found.append(counted.part(sent[trained.client], trained.bytes_up))
            losses[trained.client] = trained.loss
            tell(len(found), len(selected))
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
        told = [(losses[client.client], client.samples) for client in selected]
        return Gathered(selected, parts, told, updates.merged)
