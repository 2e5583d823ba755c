"""One asynchronous merge after the other: answers are taken at any time, and those at work stay in.

Unlike a round it does not close to be merged. What has arrived when the merge begins is in it; what arrives
meanwhile counts in the next one, which opens in the same transaction in which this one is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fedmpq.method.state import GlobalModel
from fedmpq.server.buffered_work import BufferedWork
from fedmpq.server.flight_time import FlightTime
from fedmpq.server.learned_deadline import slowest_answers
from fedmpq.server.merge_failures import blaming
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.round_work import Merged
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import Answered, Commit, Member, Round, Seat, TrainingCommit, TrainingRound

LAST = "the run has made its last merge"


@dataclass(frozen=True)
class _Committed:
    merged: Merged
    members: list[Member]
    opened: Round | None
    """The next merge; None: there is none, or a calibration comes first."""
    slowest: tuple[float, ...]


class BufferInProgress(RoundInProgress):
    """The merges of a run, from the opening of one to the commit of the last."""

    work: BufferedWork
    time: FlightTime

    def __init__(self, resources: Resources, work: BufferedWork, stored: Round, *, new: bool) -> None:
        super().__init__(resources, work, stored, new=new)
        self.time = FlightTime(resources.clock, resources.steady, stored, new=new)
        self._merging = False
        self._over = False

    @property
    def is_over(self) -> bool:
        return self._over

    def _seconds_left(self, seat: Seat) -> float | None:
        whole = self.work.flight_seconds
        return whole - self.time.at_work(seat.client) if whole else None

    # Accepting

    async def _add_answers(self, answers: Sequence[Answered]) -> list[str | UpdateRefused]:
        """One that is too late for the next merge, this one being made, is not acknowledged: it would be
        lost."""
        refused = {answer.client: reason for answer in answers if (reason := self._too_late(answer))}
        taken = [answer for answer in answers if answer.client not in refused]
        receipts = iter(await super()._add_answers(taken) if taken else [])
        return [
            UpdateRefused(refused[answer.client]) if answer.client in refused else next(receipts)
            for answer in answers
        ]

    def _too_late(self, answer: Answered) -> str | None:
        seat = self._seats.get(answer.client)
        if not self._merging or seat is None or seat.state != "selected" or seat.version is None:
            return None
        return self.work.refusal(seat.version)

    # Merging

    async def merge(self) -> None:
        self.work.is_last = self.active.next_round >= self.active.config.rounds
        if self.work.is_last and (pending := self.stored.seats_in("selected")):
            await self._close(pending, LAST)
        async with self._lock:
            closing, self._merging = self.stored, True
        self._resources.waiting_for = "the merge"
        try:
            prepared = await self._resources.workers.merge(self._prepare, closing)
            async with self._lock:
                self._go_on(await asyncio.to_thread(self._commit_merge, *prepared))
        finally:
            self._merging = False

    def _prepare(self, closing: Round) -> tuple[GlobalModel, Commit]:
        timing = self.time.timing()
        with blaming(self.work, closing, timing):
            return self.work.prepare(closing, timing)

    def _commit_merge(self, model: GlobalModel, commit: Commit) -> _Committed:
        store, run_id, now = self._store, self.address.run_id, self._resources.clock()
        run = self._resources.freeing(lambda: self.work.commit(store, commit, now))
        opened = None if self.work.is_last else store.current_round(run_id)
        merged = Merged(run, model, commit)
        return _Committed(merged, store.members(run_id), opened, slowest_answers(store, run_id))

    def _go_on(self, committed: _Committed) -> None:
        merged, opened = committed.merged, committed.opened
        self._count(merged)
        self.active.merged(merged.run, merged.model, committed.members)
        self.active.measured(merged.commit.metrics)
        if not isinstance(opened, TrainingRound):
            self._over = True
            self._resources.outgoing.keep_only(())
            return
        assert isinstance(merged.commit, TrainingCommit)
        assert merged.commit.carried is not None
        dropped = merged.commit.carried.dropped
        for client, reason in dropped.items():
            self.cancel([self._seats[client]], reason)
        self._resources.tally.cut += len(dropped)
        self.work = self.work.following(merged.model, opened.seats, opened.target, committed.slowest)
        self.stored, self.time = opened, self.time.go_on(self._resources.clock, opened)
        self.doing = {client: words for client, words in self.doing.items() if client in self._seats}
        self.failed.clear()
        self._resources.outgoing.keep_only(self.work.payloads(opened.seats_in("selected")))
