"""Waiting for the answers of an open round: who is waited for, who takes a free place, when it is enough.

A place is lost when its client's answer is rejected, when the client is revoked or says that it cannot take
part, and when it was away for longer than the work's `grace`. It goes to a connected client that has none.

The round closes
1. when a quorum has answered, and nobody else is awaited or the deadline passed;
2. below the quorum, when nobody has a place any more who has not answered, and nobody could take one;
3. below the quorum, when the deadline passed, all who have not answered are gone, and nobody could take their
   places; or when it passed for the third time, whoever is there and silent.
It never closes without any answer.
"""

from __future__ import annotations

import logging

from fedmpq.server.pace import Pace
from fedmpq.server.places import Standing, spares, spares_may_come, standing, unrevoked
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import NOBODY, RoundInProgress
from fedmpq.server.store.records import Client, Seat

LOOK_SECONDS = 5.0
"""At least so often it is looked who was revoked and who has been away for too long."""
MAX_DECLINES = 3
"""A client that gave up its place in a round so often gets no other there, however often it comes back."""
MAX_EXTENSIONS = 2
"""How often a round without a quorum waits once more for boards that are connected and silent."""


class Collecting:
    """The wait for one round's answers."""

    def __init__(self, resources: Resources, current: RoundInProgress) -> None:
        self._resources = resources
        self._connections = resources.connections
        self._round = current
        self._active = current.active
        self._work = current.work
        self._time = current.time
        self._look_again = resources.steady()
        self._pace = Pace()

    async def until_enough(self) -> None:
        """Until the round can close."""
        while True:
            seen = self._connections.changed.count
            self._resources.check_run(self._active.run)
            # This one waits for the database, seldom enough; a rest is for what the look itself takes.
            await self._free_revoked()
            self._pace.begin()
            now = standing(self._round.stored, self._active, self._connections, self._work.grace)
            if self._is_enough(now):
                return
            if self._time.is_late:
                if not await self._extend(now):
                    return
            elif not await self._refill(now):
                if await self._is_all_there_can_be(now):
                    return
                self._resources.waiting_for = self._words(now)
                self._pace.end()
                await self._connections.changed.wait(seen, self._seconds_to_wait())
                await self._pace.rest()

    def _is_enough(self, now: Standing) -> bool:
        """Whether a quorum has answered and none of the others is worth waiting for."""
        enough = now.answered >= self._work.needed
        return enough and (not now.awaited or self._time.is_late or self._work.closes_early)

    async def _is_all_there_can_be(self, now: Standing) -> bool:
        """Whether some have answered, nobody else is left to, and nobody could take a place."""
        if not now.answered or now.pending:
            return False
        if await spares_may_come(self._resources, self._active, self._round.stored):
            return False
        self._round.say("round goes on with fewer", level=logging.WARNING, **self._round.counts())
        return True

    def _seconds_to_wait(self) -> float:
        return LOOK_SECONDS if self._time.left is None else min(LOOK_SECONDS, self._time.left)

    def _words(self, now: Standing) -> str:
        """What the round waits for, for the operator's eyes."""
        words = self._work.progress(now.answered, len(self._round.stored.seats))
        if not now.pending:
            words += "; no board can take a free place: connect another"
        elif now.away:
            words += f"; {now.away} of the boards it waits for are away"
            words += "" if self._time.left is None else f", for {self._time.left:.0f} s at most"
        return words

    async def _free_revoked(self) -> None:
        """Those whose identity has ended have no place any more."""
        if self._resources.steady() < self._look_again:
            return
        self._look_again = self._resources.steady() + LOOK_SECONDS
        pending = [seat.client for seat in self._round.stored.seats_in("selected")]
        allowed = await unrevoked(self._resources, map(self._active.client_id, pending))
        revoked = [client for client in pending if self._active.client_id(client) not in allowed]
        if revoked:
            reason = "the client was revoked"
            await self._round.reopen(NOBODY, seconds=self._time.left, cut=revoked, reason=reason)

    async def _refill(self, now: Standing) -> bool:
        """Others for those who lost their places or are gone; False: none is needed, or there is none."""
        missing = self._work.needed - now.answered - now.awaited
        others = await self._spares() if missing > 0 else []
        if not others:
            return False
        seating = await self._round.deal_to(others, missing)
        reason = f"it was away for more than {self._work.grace:g} s"
        cut = now.gone[: len(seating.seats)]
        await self._round.reopen(seating, seconds=self._time.left, cut=cut, reason=reason)
        return True

    async def _extend(self, now: Standing) -> bool:
        """The deadline passed without a quorum: those who are away give up their places to others, and the
        third time so do those who are there and silent. False: the round closes with what it has."""
        others = await self._spares()
        stored = self._round.stored
        pending, last = stored.seats_in("selected"), stored.extended >= MAX_EXTENSIONS
        late = [seat.client for seat in pending if last or not self._is_here(seat)]
        missing = self._work.needed - now.answered - (len(pending) - len(late))
        count = self._work.replacements(missing=missing, available=len(others))
        if now.answered and not count and (last or not now.awaited):
            self._round.say(
                "round closes below its quorum",
                level=logging.WARNING,
                missing=self._round.missing(),
                **self._round.counts(),
            )
            return False
        seating = await self._round.deal_to(others, count) if count else NOBODY
        seconds, reason = self._work.seconds or None, "the deadline passed"
        await self._round.reopen(seating, seconds=seconds, extended=True, cut=late[:count], reason=reason)
        self._resources.tally.extended += 1
        phase = stored.address.phase
        facts = {"phase": phase, "missing": self._round.missing(), **self._round.counts()}
        self._round.say("round extended", level=logging.WARNING, **facts)
        return True

    async def _spares(self) -> list[Client]:
        """Nobody, while the run is paused: it takes nobody new into its round."""
        if self._active.run.state == "paused":
            return []
        free = await spares(self._resources, self._active, self._round.stored)
        return [client for client in free if self._round.declines[client.client_id] < MAX_DECLINES]

    def _is_here(self, seat: Seat) -> bool:
        return self._connections.get(self._active.client_id(seat.client)) is not None
