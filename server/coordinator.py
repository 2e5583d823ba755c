"""The loop over the runs: take up what is open, go from round to round, finish, then the next run.

What happens within a round is `RoundInProgress`. After a crash the stored facts are read again and the loop
goes on: the open round has the same clients, their payloads are made again, and the answers that were
acknowledged are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fedmpq.server.active_run import ActiveRun, ReplayError
from fedmpq.server.agreed_range import is_open
from fedmpq.server.blobs import Blobs, Outgoing, Uploads
from fedmpq.server.collecting import Collecting
from fedmpq.server.connections import Connection, Connections
from fedmpq.server.exports import Exports
from fedmpq.server.farewells import Farewells
from fedmpq.server.final_exports import FinalExports
from fedmpq.server.going_on import GoingOn, tell_held
from fedmpq.server.readiness import describe, mark_declined
from fedmpq.server.resources import FIRST_RETRY_SECONDS, Ended, Resources, Stopped, Tally
from fedmpq.server.rollouts import Rollouts
from fedmpq.server.round_events import run_ended
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.round_opening import open_next, take_up
from fedmpq.server.run_controls import RunControls
from fedmpq.server.store.errors import StoreError, UpdateRefused
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED, RoundAddress, Run, Seat
from fedmpq.system.logs import say

T = TypeVar("T")
log = logging.getLogger("fedmpq.server")


class Coordinator:
    """Conducts the runs in the store, one after the other."""

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
        self.store, self.blobs = store, blobs
        self.outgoing = outgoing
        self.connections = connections
        self.exports = exports
        self.uploads = uploads
        self.rollouts = Rollouts(store, exports, clock)
        self.active: ActiveRun | None = None
        """The run at work; None: there is none."""
        self.round: RoundInProgress | None = None
        """Its open round; None: the next one is not open yet."""
        self.loading = True
        """Whether the run at work is still being read from the store: what it has is then not all known."""
        self._resources = Resources(store, blobs, outgoing, connections, clock, steady)
        self.clock = clock
        self._farewells = Farewells(connections)
        self._final_exports = FinalExports(self._resources, exports)
        self._delay = FIRST_RETRY_SECONDS
        self.controls = RunControls(self)
        """What the operator asks of runs."""
        self._uninterrupted: set[asyncio.Task[Any]] = set()

    @property
    def tally(self) -> Tally:
        return self._resources.tally

    @property
    def waiting_for(self) -> str:
        """What the run at work waits for, for the operator's eyes."""
        return self._resources.waiting_for

    @property
    def waiting_since(self) -> float:
        """When it began to wait for that."""
        return self._resources.waiting_since

    # The loop

    async def conduct(self, exit_when_done: bool) -> None:
        """Run after run, until told to stop, or until none is left if `exit_when_done`."""
        try:
            await self._resources.persist(self._resources.sweep_blobs)
            last = await self._owe_farewells()
            if last is not None:
                # A server that was killed may not have come to it; no later run has begun before.
                await self._final_exports.make(last)
            while True:
                seen = self.connections.changed.count
                self._resources.check_stop()
                run = await self._resources.persist(self.store.next_run)
                if run is not None:
                    await self._conduct_run(run)
                    continue
                self.loading = False
                await self._tidy_uploads()
                if exit_when_done:
                    return
                await self.connections.changed.wait(seen)
        except Stopped:
            return

    def stop(self) -> None:
        """Begin nothing new; `conduct` returns when what is under way is stored."""
        self._resources.stopping = True
        self.connections.changed.ring()

    async def _conduct_run(self, run: Run) -> None:
        """One run to its end. A disk or database that fails is tried again, from the stored facts."""
        try:
            self.loading = True
            active = await self._take_up(run)
            self.loading, self._delay = False, FIRST_RETRY_SECONDS
            await self._rounds(active)
        except Ended:
            pass
        except OSError as error:
            self.loading, self.round = True, None
            self._delay = await self._resources.wait_out(error, self._delay)
            return
        except Stopped:
            raise
        except Exception as error:
            await self._hold(run, error)
            return
        await self._finish(run.run_id)

    async def _hold(self, run: Run, error: Exception) -> None:
        """The run waits until the operator has mended what is wrong and resumes it, or aborts it."""
        reason = tell_held(run, error)
        self.loading, self.round = True, None
        try:
            held = await self._resources.persist(
                self.store.pause_run, run.run_id, f"{reason}; then: fedmpq runs resume"
            )
        except StoreError:
            # It has ended meanwhile.
            return
        self.controls.changed(held)
        while held.state == "paused":
            seen = self.connections.changed.count
            self._resources.check_stop()
            await self.connections.changed.wait(seen)
            held = await self._resources.persist(self.store.run, run.run_id)
        if held.state in ENDED:
            await self._finish(run.run_id)

    async def _take_up(self, run: Run) -> ActiveRun:
        """The run where it was left, with the round it has open."""
        load = self._resources.workers.merge(ActiveRun.load, self.store, self.blobs, run)
        active = self.active = await load
        await self._catch_up(active)
        stored = await asyncio.to_thread(self.store.current_round, run.run_id)
        if stored is None:
            await asyncio.to_thread(self.outgoing.keep_only, ())
            await self._tidy_uploads()
            return active
        current = self.round = await take_up(self._resources, active, stored)
        await self._tidy_uploads()
        phase, number = stored.address.phase, stored.address.number
        say(log, f"{phase} goes on", run=run.name, round=number, **current.counts())
        current.assign()
        return active

    async def _catch_up(self, active: ActiveRun) -> None:
        """The operator may have paused or resumed the run while it was read, when nobody was here to hear."""
        seen = -1
        while seen != self.controls.count:
            seen = self.controls.count
            run = await asyncio.to_thread(self.store.run, active.run.run_id)
        active.run = run

    async def _rounds(self, active: ActiveRun) -> None:
        """Until the run has ended, which raises Ended."""
        while True:
            self._resources.check_run(active.run)
            try:
                if self.round is None:
                    self._begin(await open_next(self._resources, active))
                else:
                    await self._go_through(self.round)
            except StoreError:
                # Paused or aborted meanwhile?
                await self._reread(active)

    def _begin(self, opened: RoundInProgress) -> None:
        self.round = opened
        self._resources.waiting_for = ""
        opened.say_opened()
        opened.assign()
        self.connections.changed.ring()

    async def _go_through(self, current: RoundInProgress) -> None:
        await Collecting(self._resources, current).until_enough()
        if not await GoingOn(self._resources, current).merged():
            return
        self.round = None
        await self._tidy_uploads()
        self.connections.changed.ring()

    async def payload_size(self, name: bytes) -> int | None:
        """Of a payload that clients may download; one of the open round that is damaged is made again."""
        size = await asyncio.to_thread(self.outgoing.size, name)
        current = self.round
        if size is not None or current is None:
            return size
        if not any(seat.payload == name for seat in current.stored.seats):
            return None
        await self._resources.workers.merge(
            current.work.make_payloads_again, current.stored.seats, self.outgoing
        )
        return await asyncio.to_thread(self.outgoing.size, name)

    async def _tidy_uploads(self) -> None:
        """What was sent for a round that takes it no more is removed."""
        waiting: list[str] = []
        if self.active is not None and self.round is not None:
            seats = self.round.stored.seats_in("selected")
            waiting = [self.active.client_id(seat.client) for seat in seats]
        await asyncio.to_thread(self.uploads.keep_only, waiting)

    async def _reread(self, active: ActiveRun) -> None:
        """The store refused a step; that is in order if the operator stopped the run, and a fault if not."""
        run = await asyncio.to_thread(self.store.run, active.run.run_id)
        if run.state == "running" or run.round != active.model.round:
            raise ReplayError(
                f"run {run.name!r} is not as this server left it; is another one at work on it?"
            )
        active.run = run

    async def _finish(self, run_id: str) -> None:
        """Tell everyone that the run is over and forget what only it needed."""
        run = await self._resources.persist(self.store.run, run_id)
        if run.state == "finished" and run.config["rounds"] > run.round:
            # It was given more rounds while its last one was being merged.
            run = await self._resources.persist(self.store.configure_run, run_id, run.config, run.config)
        if run.state not in ENDED:
            self.active = self.round = None
            return
        await self._final_exports.make(run)
        if self.round is not None:
            self.round.cancel(self.round.stored.seats_in("selected"), "the run was aborted")
        self.active = self.round = None
        await self._tidy_uploads()
        await self.exports.tidy(run, self.outgoing, self.store.released_rounds)
        await self._owe_farewells()
        self._farewells.tell_connected()
        await self._resources.persist(self._resources.sweep)
        say(log, f"run {run.state}", run=run.name, rounds=run.round, reason=run.reason or None)
        self.connections.changed.ring()

    async def _owe_farewells(self) -> Run | None:
        """The run that ended last, whose clients are to hear of it; None: no run has ended.

        A server that was killed may not have told everyone.
        """
        last = await self._resources.persist(self.store.last_ended)
        if last is not None:
            members = await self._resources.persist(self.store.members, last.run_id)
            self._farewells.owe([member.client_id for member in members], run_ended(last))
        return last

    # What the services ask for

    def greet(self, connection: Connection) -> None:
        """What a client that has just connected must know: its unfinished work, or that the run is over."""
        if self.active is not None and connection.answers and not is_open(self.active):
            describe(connection, self.active)
        if self.round is not None:
            self.round.greet(connection)
        elif self.active is None:
            self._farewells.tell(connection)

    async def farewell(self, seconds: float) -> None:
        """Until every client of the last run knows that it is over, but no longer than this."""
        await self._farewells.all_told(seconds)

    def place(self, client_id: str, address: RoundAddress) -> Seat | None:
        """The client's seat in the open round, if that is the round it speaks of."""
        return None if self.round is None else self.round.place(client_id, address)

    def note_upload(self, client_id: str) -> None:
        """A client has begun to upload, for the operator's eyes."""
        if self.round is not None:
            self.round.note(client_id, "uploading")

    def note_download(self, client_id: str) -> None:
        """A client has downloaded what it works on."""
        if self.round is not None:
            self.round.note(client_id, self.round.work.activity)

    async def accept(self, client_id: str, address: RoundAddress, name: bytes, upload: Path | bytes) -> str:
        """Check an update or calibration that has arrived whole and make it durable; its receipt.

        Raises Rejected, UpdateRefused or DamagedUpload. Goes on to its end if the caller goes away.
        """
        current, seat = self.round, self.place(client_id, address)
        if current is None or seat is None:
            raise UpdateRefused(f"round {address.number} is over, or this client is not in it")
        return await self._to_the_end(current.accepting.accept(client_id, seat, name, upload))

    async def reject(self, client_id: str, address: RoundAddress, reason: str) -> None:
        """Count a bad upload against its sender."""
        current, seat = self.round, self.place(client_id, address)
        if current is not None and seat is not None:
            await self._to_the_end(current.reject(seat, reason))

    async def decline(self, client_id: str, address: RoundAddress | None, reason: str) -> None:
        """The client cannot take part in that round, or whichever is open, nor in others on this stream."""
        mark_declined(self.connections, client_id, reason)
        current = self.round
        if current is None:
            return
        if (seat := current.place(client_id, address or current.address)) is not None:
            await self._to_the_end(current.decline(seat, reason))

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """A call that its client cancels half-way must not leave the store ahead of what is known here."""
        task = asyncio.ensure_future(work)
        self._uninterrupted.add(task)
        task.add_done_callback(self._uninterrupted.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """When no update is half-way any more; none can be accepted after this."""
        while self._uninterrupted:
            await asyncio.wait(self._uninterrupted)
        self._resources.workers.shutdown()
