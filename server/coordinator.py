"""The loop over the runs: take up what is open, go from round to round, finish, then the next run.

What happens within a round is `RoundInProgress`. After a crash the stored facts are read again and the loop
goes on: the open round has the same clients, their payloads are made again, and the answers that were
acknowledged are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fedmpq.server.active_run import ActiveRun, ReplayError
from fedmpq.server.at_work import AtWork
from fedmpq.server.blobs import Blobs, Outgoing, Uploads
from fedmpq.server.connections import Connections
from fedmpq.server.exports import Exports
from fedmpq.server.final_exports import FinalExports
from fedmpq.server.gathering import collecting
from fedmpq.server.going_on import GoingOn, tell_held
from fedmpq.server.resources import FIRST_RETRY_SECONDS, Ended, Resources, Stopped, Tally
from fedmpq.server.roles import require_rounds
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.round_opening import open_next, take_up
from fedmpq.server.run_controls import RunControls
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED, Run
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


class Coordinator(AtWork):
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
        alone: bool = True,
    ) -> None:
        resources = Resources(store, blobs, outgoing, connections, clock, steady)
        super().__init__(resources, exports, uploads)
        self._alone = alone
        """Whether answers come to this process alone; else front-ends may be storing some at any time."""
        self._final_exports = FinalExports(self._resources, exports)
        self._delay = FIRST_RETRY_SECONDS
        self.controls = RunControls(self)
        """What the operator asks of runs."""

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
            if self._alone:
                # Of an answer on its way to a front-end's round the blob is there before its fact is.
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
                if self.loading:
                    # Boards that came before it was known who must hear of the end.
                    self._farewells.tell_connected()
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
        if not self._alone:
            require_rounds(active.config)
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
        await collecting(self._resources, current).until_enough()
        if not await GoingOn(self._resources, current).merged():
            return
        if current.is_over:
            self.round = None
        await self._tidy_uploads()
        self.connections.changed.ring()

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
