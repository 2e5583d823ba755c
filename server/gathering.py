"""Waiting for the changes of an asynchronous merge: who is at work, who is given work, when there are enough.

So many boards are at work at a time as a round would have. One that was away for longer than the run's
`grace`, or is silent beyond its time, does not count among them: another is given work. Its own answer is
still taken, as long as it is not too old.

No board has two places in one merge. The merge is made when enough have answered; with fewer when nobody else
is at work, nobody else could be given work, and nobody is expected back.
"""

from __future__ import annotations

import logging

from fedmpq.server.buffer_in_progress import BufferInProgress
from fedmpq.server.collecting import MAX_DECLINES, Collecting
from fedmpq.server.places import Standing, selectable, spares_may_come, without_place
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import RoundInProgress


class Gathering(Collecting):
    """The wait for the changes of one merge."""

    def __init__(self, resources: Resources, current: BufferInProgress) -> None:
        super().__init__(resources, current)
        self._buffer = current
        self._too_few = ""

    def _is_enough(self, now: Standing) -> bool:
        return now.answered >= self._work.needed

    def _at_work(self, now: Standing) -> int:
        """Boards whose answers are expected soon."""
        pending = {seat.client for seat in self._round.stored.seats_in("selected")}
        late = self._buffer.time.late(pending, self._buffer.work.flight_seconds)
        return len(pending - late - set(now.gone))

    async def _refill(self, now: Standing) -> bool:
        """Work for boards that are ready, as far as there is room; False: none is given."""
        config, at_work = self._active.config, self._at_work(now)
        full = config.clients_per_round is not None and at_work >= config.clients_per_round
        if full or self._active.run.state == "paused":
            return False
        ready = await selectable(self._resources, self._active)
        self._too_few = ""
        if config.min_clients is not None and len(ready) < config.min_clients:
            self._too_few = f"; {len(ready)} of {config.min_clients} clients ready"
            return False
        free = without_place(ready, self._active, self._round.stored)
        free = [client for client in free if self._round.declines[client.client_id] < MAX_DECLINES]
        room = min(config.target(len(ready)) - at_work, len(free))
        if room <= 0:
            return False
        await self._round.reopen(await self._round.deal_to(free, room), seconds=None)
        return True

    async def _is_all_there_can_be(self, now: Standing) -> bool:
        if not now.answered or self._at_work(now) or self._active.run.state == "paused":
            return False
        if await spares_may_come(self._resources, self._active, self._round.stored):
            return False
        self._round.say("merge goes on with fewer", level=logging.WARNING, **self._round.counts())
        return True

    def _words(self, now: Standing) -> str:
        words = f"{self._work.progress(now.answered, 0)}; {self._at_work(now)} boards at work"
        silent = now.pending - self._at_work(now)
        return words + (f", {silent} away or silent for too long" if silent else "") + self._too_few


def collecting(resources: Resources, current: RoundInProgress) -> Collecting:
    """The wait that goes with the round."""
    if isinstance(current, BufferInProgress):
        return Gathering(resources, current)
    return Collecting(resources, current)
