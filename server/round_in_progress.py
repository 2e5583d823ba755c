"""The open round: who has a place in it, what they send, when it closes and what it comes to.

Everything it knows is stored before it acts on it, so that after a crash another one goes on from the stored
facts. It lives in the event loop and hands what blocks to threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmpq.server.accepting import Accepting
from fedmpq.server.connections import Connection
from fedmpq.server.merge_failures import blaming
from fedmpq.server.readiness import describe
from fedmpq.server.resources import Resources
from fedmpq.server.round_events import work_assigned, work_cancelled
from fedmpq.server.round_time import RoundTime
from fedmpq.server.round_work import Merged, RoundWork, Seating
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import (
    Answer,
    Answered,
    CalibrationRound,
    Client,
    Member,
    Round,
    RoundAddress,
    Seat,
)
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

NOBODY = Seating((), ())
MOST_NAMED = 20
"""Clients that a line of the log names one by one."""


class RoundInProgress:
    """A round or calibration from its opening to its merge."""

    def __init__(self, resources: Resources, work: RoundWork, stored: Round, *, new: bool) -> None:
        self.work = work
        self.active = work.active
        self._stored = stored
        self._seats = {seat.client: seat for seat in stored.seats}
        self._seats_are_newer = False
        self.doing: dict[int, str] = {}
        """By client: "training", "measuring" or "uploading"; only for the operator's eyes."""
        self.failed: set[str] = set()
        """Clients whose answers could not be merged; others are asked first."""
        self.declines = Counter[str]()
        """How often each client gave up a place."""
        self._resources = resources
        self._connections = resources.connections
        self._store = resources.store
        self.time = RoundTime(resources.clock, resources.steady, stored, work.seconds, new=new)
        self._whole = work.seconds
        # What the store says of the round, and `stored`, change together.
        self._lock = asyncio.Lock()
        self.accepting = Accepting(self, resources)

    @property
    def stored(self) -> Round:
        """The round as the store has it."""
        if self._seats_are_newer:
            self._stored = replace(self._stored, seats=tuple(self._seats.values()))
            self._seats_are_newer = False
        return self._stored

    @stored.setter
    def stored(self, stored: Round) -> None:
        self._stored = stored
        self._seats = {seat.client: seat for seat in stored.seats}
        self._seats_are_newer = False

    @property
    def address(self) -> RoundAddress:
        return self._stored.address

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for, once it has been merged."""
        return True

    # Placing

    def place(self, client_id: str, address: RoundAddress) -> Seat | None:
        """The client's seat, if this is the round it speaks of."""
        seat = self._seat_of(client_id)
        return seat if seat is not None and self.address.sent(seat) == address else None

    def _seat_of(self, client_id: str) -> Seat | None:
        member = self.active.members.get(client_id)
        return None if member is None else self._seats.get(member.client)

    def assign(self) -> None:
        """Send their work to all who have not answered and are connected; the others get it when they are."""
        for seat in self.stored.seats_in("selected"):
            self.assign_to(seat)

    def greet(self, connection: Connection) -> None:
        """A client that has just connected gets its unfinished work."""
        seat = self._seat_of(connection.client.client_id)
        if seat is not None and seat.state == "selected":
            self._send_work(connection, seat)

    def assign_to(self, seat: Seat) -> None:
        """The seat's work, if its client is connected."""
        connection = self._connections.get(self.active.client_id(seat.client))
        if connection is not None:
            self._send_work(connection, seat)

    def _send_work(self, connection: Connection, seat: Seat) -> None:
        describe(connection, self.active)
        left = self._seconds_left(seat)
        connection.send(work_assigned(self.work, seat, 0.0 if left is None else max(0.001, left)))

    def _seconds_left(self, seat: Seat) -> float | None:
        return self.time.left

    def cancel(self, seats: Iterable[Seat], reason: str, address: RoundAddress | None = None) -> None:
        """Tell these clients that the round goes on, or ends, without them: this one, or `address`."""
        for seat in seats:
            event = work_cancelled((address or self.address).sent(seat), reason)
            self._connections.send(self.active.client_id(seat.client), event)

    def note(self, client_id: str, doing: str) -> None:
        """What a client is doing, for the operator's eyes."""
        if (member := self.active.members.get(client_id)) is not None:
            self.doing[member.client] = doing
            self._connections.changed.ring()

    # Accepting and rejecting

    async def add_answers(self, answers: Sequence[Answered]) -> list[str | UpdateRefused]:
        """One transaction for all of them, and what is known here changes with it."""
        async with self._lock:
            receipts = await self._add_answers(answers)
            for answer, receipt in zip(answers, receipts, strict=True):
                if isinstance(receipt, str):
                    self._answered(answer, receipt)
        return receipts

    async def _add_answers(self, answers: Sequence[Answered]) -> list[str | UpdateRefused]:
        return await asyncio.to_thread(self._store.add_answers, self.address, answers)

    def _answered(self, new: Answered, receipt_id: str) -> None:
        known = self._seats.get(new.client)
        if known is not None and known.state == "selected":
            answer = Answer(new.payload, new.payload_bytes, receipt_id)
            self._change(known, replace(known, state="updated", answer=answer))

    async def reject(self, seat: Seat, reason: str) -> None:
        """Count a bad answer against its sender."""
        async with self._lock:
            rejected = await asyncio.to_thread(self._store.reject_answer, self.address, seat.client, reason)
            if not rejected:
                return
            self._change(seat, replace(seat, state="rejected", reason=reason))
        self._connections.changed.ring()

    async def decline(self, seat: Seat, reason: str) -> None:
        """The client cannot take part: its place is free, and it has no strike."""
        async with self._lock:
            if not await asyncio.to_thread(self._store.decline, self.address, seat.client, reason):
                return
            self._change(seat, replace(seat, state="declined", reason=reason))
        self._connections.changed.ring()

    async def refresh(self, stored: Callable[[], Round | None]) -> list[tuple[Seat | None, Seat]] | None:
        """Others may have written to the store: the seats that have changed, as they were known here and as
        they are; None: another round is open, or none."""
        async with self._lock:
            fresh = await asyncio.to_thread(stored)
            if fresh is None or fresh.address != self.address:
                return None
            before, self.stored = self._seats, fresh
            changed = [(before.get(seat.client), seat) for seat in fresh.seats]
        changed = [(old, new) for old, new in changed if old != new]
        for old, new in changed:
            self._learn(old, new)
        return changed

    def _learn(self, old: Seat | None, new: Seat) -> None:
        """A place has ended, here or elsewhere: it is counted and told."""
        if old is None or old.state != "selected" or old.payload != new.payload:
            return
        if new.state == "updated":
            self._resources.tally.updates += 1
            self.time.answered(new.client)
        elif new.state == "rejected":
            self._resources.tally.rejected += 1
            self.active.strike(new.client)
            what = f"{self.work.answer_name} rejected"
            self.say(what, level=logging.WARNING, client=new.client, reason=new.reason)
        elif new.state == "declined":
            self.declines[self.active.client_id(new.client)] += 1
            self.say("client declined", level=logging.WARNING, client=new.client, reason=new.reason)

    async def change(self, store: Callable[[], Round]) -> None:
        """The store has the round in another form."""
        async with self._lock:
            self.stored = await asyncio.to_thread(store)

    def _change(self, old: Seat, changed: Seat) -> None:
        self._seats[changed.client] = changed
        self._seats_are_newer = True
        self._learn(old, changed)

    # Changing who is in it

    async def deal_to(self, others: Sequence[Client], count: int) -> Seating:
        """Places for so many of the others, or all if they are fewer."""
        outgoing = self._resources.outgoing
        fresh = [client for client in others if client.client_id not in self.failed]
        others = fresh if len(fresh) >= count else others
        return await self._resources.workers.merge(self.work.seat, others, count, outgoing)

    async def reopen(
        self,
        seating: Seating,
        *,
        seconds: float | None,
        extended: bool = False,
        cut: Sequence[int] = (),
        reason: str = "",
    ) -> None:
        """The round goes on for so many seconds, with others in it and, for that reason, without `cut`."""
        deadline = None if seconds is None else self._resources.clock() + seconds

        def store() -> tuple[Round, list[Member]]:
            address = self.address
            reopened = self._store.reopen_round(
                address,
                deadline=deadline,
                extended=extended,
                cut=cut,
                reason=reason,
                members=seating.members,
                seats=seating.seats,
            )
            return reopened, self._store.members(address.run_id)

        self._resources.check_run(self.active.run)
        async with self._lock:
            self.stored, members = await asyncio.to_thread(store)
            self.active.seated(self.active.model.bit_widths, members)
            self.time.restart(seconds)
        self._resources.tally.cut += len(cut)
        self.cancel([seat for seat in self.stored.seats_in("cut") if seat.client in cut], reason)
        new = {seat.client for seat in seating.seats}
        for seat in self.stored.seats:
            if seat.client in new:
                self.time.placed(seat.client)
                self.assign_to(seat)

    async def keep_time(self) -> None:
        """After a restart: the store has the deadline that this process counts down to."""
        left, deadline = self.time.left, self.stored.deadline
        counted = None if left is None else self._resources.clock() + left
        if counted != deadline and (counted is None or deadline is None or abs(counted - deadline) > 1):
            await self.reopen(NOBODY, seconds=left)

    async def configured(self) -> None:
        """Settings have changed: a round that now has another time waits for so long from here on."""
        whole = self.work.seconds
        if whole != self._whole:
            self._whole = whole
            await self.reopen(NOBODY, seconds=whole or None)
        self._connections.changed.ring()

    # Merging

    async def merge(self) -> None:
        """Close the round and merge its answers, for the run at work to have a new model; raises MergeFailed
        if they cannot be merged, and BlobError if one cannot be read."""
        if pending := self.stored.seats_in("selected"):
            await self._close(pending)
        self._resources.waiting_for = "the merge"
        merged, members = await self._resources.workers.merge(self._commit)
        self.active.merged(merged.run, merged.model, members)
        self.active.measured(merged.commit.metrics)
        self._count(merged)

    async def _close(self, pending: Sequence[Seat], reason: str = "") -> None:
        """The round takes no more; those it waited for hear so, and why."""
        gone = all(self._connections.get(self.active.client_id(seat.client)) is None for seat in pending)
        faster = "it was away, and enough others had answered" if gone else "enough others were faster"
        reason = reason or ("the deadline passed" if self.time.is_late else faster)
        async with self._lock:
            self.stored = await asyncio.to_thread(self._store.close_round, self.address, reason)
        waited_for = {seat.client for seat in pending}
        cut = [seat for seat in self.stored.seats_in("cut") if seat.client in waited_for]
        ids = [self.active.client_id(seat.client) for seat in cut]
        missing = _listed([self._connections.name_of(client_id) for client_id in ids])
        self.say("round closes without some", level=logging.WARNING, missing=missing, reason=reason)
        self.cancel(cut, reason)
        self._resources.tally.cut += len(cut)

    def _commit(self) -> tuple[Merged, list[Member]]:
        timing = self.time.timing()
        with blaming(self.work, self.stored, timing), self._resources.blobs.lock:
            merged = self.work.finish(self._store, self.stored, timing, self._resources.clock)
        self._resources.sweep(wait=False)
        return merged, self._store.members(merged.run.run_id)

    def _count(self, merged: Merged) -> None:
        # A calibration's facts are those of the whole round, whose training was counted before.
        before = self.stored.trained.metrics if isinstance(self.stored, CalibrationRound) else {}
        self._resources.tally.add(self.work.phase, merged.commit, self.time.elapsed, before)
        self.say(self.work.merged_words, of=self.active.config.rounds, **_told(merged.commit.metrics))

    # Telling the operator

    def counts(self) -> dict[str, int]:
        states = [seat.state for seat in self.stored.seats]
        return {
            "selected": len(states),
            "updates": states.count("updated"),
            "rejected": states.count("rejected"),
        }

    def missing(self) -> str | None:
        """Who has a place and has not answered, for the log; None: nobody."""
        pending = [self.active.client_id(seat.client) for seat in self.stored.seats_in("selected")]
        return _listed([self._connections.name_of(client_id) for client_id in pending])

    def say_opened(self) -> None:
        phase, everyone = self.address.phase, self.counts()["selected"]
        what = "round opened" if phase == "training" else "calibration opened"
        self.say(what, clients=everyone, names=self.missing())

    def say(self, what: str, level: int = logging.INFO, **facts: Any) -> None:
        """An event of this round in the log."""
        say(log, what, level=level, run=self.active.run.name, round=self.address.number, **facts)


def _listed(names: Sequence[str]) -> str | None:
    shown = ",".join(sorted(names)[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{shown}{more}" or None


def _told(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the log tells of a merged round."""
    facts = {name: value for name, value in metrics.items() if name not in ("bit_widths", "round")}
    return {name: value for name, value in facts.items() if value not in ({}, "", None)}
