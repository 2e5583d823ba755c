"""What a front-end knows of the run at work and its open round: what the store says, looked at over and over.

A front-end makes the round's payloads itself, from the same model as the leader and to the same bytes, checks
what boards bring against them, and stores good answers. Who is in the round, when it closes and what it comes
to, the leader decides; a front-end reads it in the store and tells its boards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fedmpq.server.active_run import ActiveRun, ReplayError
from fedmpq.server.agreed_range import is_open
from fedmpq.server.at_work import AtWork
from fedmpq.server.blobs import BlobError, Blobs, Outgoing, Uploads
from fedmpq.server.connections import Connections
from fedmpq.server.exports import Exports
from fedmpq.server.held_updates import HeldUpdates
from fedmpq.server.learned_deadline import slowest_answers
from fedmpq.server.opened_work import work_of
from fedmpq.server.pace import Pace
from fedmpq.server.places import unrevoked
from fedmpq.server.readiness import describe_to_all
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.round_time import time_left
from fedmpq.server.run_range import stored_range
from fedmpq.server.store.errors import StoreError, StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED, Client, Forwarded, Round, RoundAddress, Run, Seat
from fedmpq.server.wake_ups import WakeUps
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

REVOKED_SECONDS = 5.0
"""At least so often it is looked who was revoked."""


class Following(AtWork):
    """The work of one front-end."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        outgoing: Outgoing,
        connections: Connections,
        exports: Exports,
        uploads: Uploads,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Resources(store, blobs, outgoing, connections, clock, steady), exports, uploads)
        self._failure = ""
        self._turn = asyncio.Lock()
        self._looks = 0
        self._look_for_revoked = steady()

    @property
    def is_well(self) -> bool:
        """Whether the last look went well."""
        return not self.loading and not self._failure

    async def follow(self, wake_ups: WakeUps, looked: Callable[[bool], object]) -> None:
        """Until it is cancelled. `looked` is told after each look whether it went well."""
        pace, owed = Pace(share=1.0), False
        while True:
            seen = wake_ups.bell.count
            pace.begin()
            try:
                if not owed:
                    await self._owe_farewells()
                    owed = True
                await self.look()
                self._fails("")
            except (OSError, StoreError, BlobError, ReplayError) as error:
                self._fails(str(error), told=isinstance(error, StoreFailed))
            except Exception as error:
                log.exception("a look at the run failed")
                self._fails(str(error) or type(error).__name__, told=True)
            pace.end()
            looked(self.is_well)
            await wake_ups.wait(seen)
            await pace.rest()

    def _fails(self, failure: str, told: bool = False) -> None:
        if failure and failure != self._failure and not told:
            say(log, "the run cannot be followed; trying again", level=logging.ERROR, error=failure)
        self._failure = failure

    # Looking

    async def look(self) -> None:
        """Once at everything."""
        async with self._turn:
            self._looks += 1
            await self._look()

    async def _look(self) -> None:
        run = await asyncio.to_thread(self.store.next_run)
        known = self.active
        if known is not None and (run is None or run.run_id != known.run.run_id):
            await self._end(known)
            known = None
        if run is not None:
            await self._look_at(run, known)
        self.loading = False
        await self._shut_out_revoked()

    async def _look_at(self, run: Run, known: ActiveRun | None) -> None:
        if known is not None and self.round is not None:
            await self._go_on(known, self.round)
        stored = None
        if self.round is None:
            stored = await asyncio.to_thread(self.store.current_round, run.run_id)
            if known is None or _moved(known.run, run):
                load = self._resources.workers.merge(ActiveRun.load, self.store, self.blobs, run)
                known = self.active = await load
        assert known is not None, "an open round is of the run that is known"
        await self._keep_up(known, run)
        # The leader may have gone on between two of these questions; the next look finds all of it then.
        if stored is not None and _fits(known, stored):
            await self._take_up(known, stored)

    async def _keep_up(self, known: ActiveRun, run: Run) -> None:
        """Settings that have changed, and a range that the boards have agreed on."""
        if run.config != known.run.config:
            known.configured(run)
            self.connections.forget_descriptions()
        known.run = run
        if is_open(known):
            found = await asyncio.to_thread(stored_range, self.store, run.run_id, known.config)
            if found is not None:
                known.use_range(found)
        if not is_open(known):
            describe_to_all(self.connections, known)

    async def _take_up(self, active: ActiveRun, stored: Round) -> None:
        """A round that is open: once its payloads are there its clients are told."""
        await self._know_members(active)
        slowest = await asyncio.to_thread(slowest_answers, self.store, active.run.run_id)
        work = work_of(active, stored, slowest)
        # The leader merges.
        work.held = HeldUpdates(0)
        await self._resources.workers.merge(work.make_payloads_again, stored.seats, self.outgoing)
        taken_up = self.round = RoundInProgress(self._resources, work, stored, new=False)
        await self._tidy(taken_up)
        taken_up.assign()

    async def _go_on(self, active: ActiveRun, current: RoundInProgress) -> None:
        """The round that was open: who has come into it and who has left is told so."""
        deadline = current.stored.deadline
        changed = await current.refresh(partial(self.store.current_round, active.run.run_id))
        if changed is None:
            await self._end_round(current)
            return
        if (moved := current.stored.deadline) != deadline:
            current.time.restart(time_left(moved, self.clock(), current.work.seconds))
        come = [seat for _, seat in changed if seat.state == "selected"]
        if come:
            await self._know_members(active)
            await self._resources.workers.merge(current.work.make_payloads_again, come, self.outgoing)
        for seat in come:
            current.assign_to(seat)
        self._cancel(current, changed)

    async def _know_members(self, active: ActiveRun) -> None:
        """Clients that have joined the run, and what each was seated with."""
        members = await asyncio.to_thread(self.store.members, active.run.run_id)
        active.seated(active.model.bit_widths, members)

    def _cancel(self, current: RoundInProgress, changed: Iterable[tuple[Seat | None, Seat]]) -> None:
        """Those whom the round goes on without hear so."""
        for old, seat in changed:
            if seat.state == "cut" and old is not None and old.state == "selected":
                current.cancel([seat], seat.reason)

    async def _end_round(self, over: RoundInProgress) -> None:
        """Who answered has its receipt, and the others hear that it went on without them."""
        self._cancel(over, await over.refresh(partial(_read, self.store, over.address)) or ())
        self.round = None
        await asyncio.to_thread(self.outgoing.keep_only, ())

    async def _end(self, known: ActiveRun) -> None:
        """Another run is at work, or none."""
        if self.round is not None:
            await self._end_round(self.round)
        ended = await asyncio.to_thread(self.store.run, known.run.run_id)
        self.active = None
        await asyncio.to_thread(self.uploads.keep_only, ())
        if ended.state in ENDED:
            await self._owe_farewells()
            self._farewells.tell_connected()

    async def _tidy(self, current: RoundInProgress) -> None:
        """What is kept here of uploads for an earlier round goes."""
        waiting = [current.active.client_id(seat.client) for seat in current.stored.seats_in("selected")]
        await asyncio.to_thread(self.uploads.keep_only, waiting)

    async def _shut_out_revoked(self) -> None:
        if self._resources.steady() >= self._look_for_revoked:
            self._look_for_revoked = self._resources.steady() + REVOKED_SECONDS
            await unrevoked(self._resources, [each.client.client_id for each in self.connections.open()])

    # What the services ask for

    async def payload_size(self, name: bytes) -> int | None:
        """A board that was told of a round at another front-end may come before this one has looked: it looks
        then, once for all who wait."""
        size = await super().payload_size(name)
        if size is not None:
            return size
        seen = self._looks
        async with self._turn:
            if self._looks <= seen:
                self._looks += 1
                await self._look()
        if self.active is not None and name == self.active.run.graph:
            await asyncio.to_thread(self.outgoing.put, self.active.graph_bytes)
        return await super().payload_size(name)

    async def accept(self, client_id: str, address: RoundAddress, name: bytes, upload: Path | bytes) -> str:
        """As the coordinator does; but a round that this front-end has not read yet is not over."""
        if self.place(client_id, address) is None:
            seat = await asyncio.to_thread(self.store.seat_of, address, client_id)
            if seat is not None and seat.state == "selected":
                raise StoreFailed("the round is being read from the store")
        return await super().accept(client_id, address, name, upload)

    async def ready(self, client: Client, run_id: str) -> None:
        """Whoever has the board's stream, and may not have said so yet, learns of it."""
        if self.connections.get(client.client_id) is None:
            await asyncio.to_thread(self.store.forward, Forwarded(client.client_id, run_id))
        else:
            await super().ready(client, run_id)

    async def decline(self, client_id: str, address: RoundAddress | None, reason: str) -> None:
        if self.connections.get(client_id) is None:
            await asyncio.to_thread(self.store.forward, Forwarded(client_id, None, reason))
        await super().decline(client_id, address, reason)


def _moved(known: Run, run: Run) -> bool:
    """Whether the run has another model, or its first bit-widths."""
    return (known.round, known.model, known.bit_widths) != (run.round, run.model, run.bit_widths)


def _fits(active: ActiveRun, stored: Round) -> bool:
    """Whether the round is of the model that was read, and one that front-ends can follow."""
    address = stored.address
    if active.config.asynchronous is not None and address.phase == "training":
        return False
    return address.number == (active.next_round if address.phase == "training" else active.model.round)


def _read(store: Store, address: RoundAddress) -> Round | None:
    if address.phase == "training":
        return store.round(address.run_id, address.number)
    return store.calibration(address.run_id, address.number)
