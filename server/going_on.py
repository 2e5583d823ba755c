"""How a round goes on whose answers could not be merged or read, and how it ends if it cannot."""

from __future__ import annotations

import asyncio
import logging

from fedmpq.method.archive import unpack_model
from fedmpq.server.active_run import ReplayError
from fedmpq.server.blobs import BlobError
from fedmpq.server.merge_failures import MAX_FAILURES, MergeFailed
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.run_config import ConfigError
from fedmpq.server.store.failed_merges import UNDONE_IN_A_ROW
from fedmpq.server.store.records import CalibrationRound, Run
from fedmpq.system.logs import with_facts

log = logging.getLogger("fedmpq.server")


class GoingOn:
    """What follows a merge that failed; everything is stored before anyone is told."""

    def __init__(self, resources: Resources, current: RoundInProgress) -> None:
        self._resources = resources
        self._store = resources.store
        self._round = current

    async def merged(self) -> bool:
        """Merge the answers of the round; False: they could not be, and the round waits for others."""
        try:
            await self._round.merge()
        except MergeFailed as failure:
            return await self.after(failure)
        except BlobError as error:
            await self.with_lost(error)
            return False
        return True

    async def after(self, failure: MergeFailed) -> bool:
        """The round waits for other answers; True: it is over, and the run is back at an earlier model."""
        current = self._round
        reason = f"{self._what} could not be merged: {failure}"
        if failure.offenders:
            await self._without(failure.offenders, reason)
            return False
        if failure.worse and isinstance(current.stored, CalibrationRound):
            await self._undo(current.stored, reason)
            return True
        await self._anew(reason)
        return False

    @property
    def _what(self) -> str:
        address = self._round.stored.address
        what = "round" if address.phase == "training" else "the calibration of round"
        return f"{what} {address.number}"

    async def _without(self, offenders: tuple[int, ...], reason: str) -> None:
        """The answers of these clients are rejected after the fact."""
        current, now = self._round, self._resources.clock()
        address = current.stored.address
        await current.change(lambda: self._store.throw_out(address, offenders, reason, now))
        for client in offenders:
            current.active.strike(client)
        self._resources.tally.rejected += len(offenders)
        clients = ",".join(map(str, offenders))
        current.say("answers thrown out", level=logging.WARNING, clients=clients, reason=reason)
        current.cancel([seat for seat in current.stored.seats if seat.client in offenders], reason)
        self._resources.connections.changed.ring()

    async def _anew(self, reason: str) -> None:
        """Nobody is to blame for sure: others are asked; after some failures the operator is."""
        current = self._round
        seconds, address = current.work.seconds or None, current.stored.address
        now = self._resources.clock()
        deadline = None if seconds is None else now + seconds
        answered = [seat for seat, _ in current.stored.answers()]
        current.failed |= {current.active.client_id(seat.client) for seat in answered}
        await current.change(lambda: self._store.do_anew(address, reason, deadline, now))
        current.time.restart(seconds)
        current.say("round is done anew", level=logging.WARNING, reason=reason)
        current.cancel(answered, reason)
        if current.stored.failures % MAX_FAILURES == 0:
            await self.pause(f"{reason}; {MAX_FAILURES} attempts failed")
        self._resources.connections.changed.ring()

    async def _undo(self, stored: CalibrationRound, reason: str) -> None:
        """The run goes on from the last model that was handed out; what was trained since does not count."""
        current, active = self._round, self._round.active
        now, last = self._resources.clock(), stored.address.number >= active.config.rounds
        undone = await asyncio.to_thread(self._store.undo, stored.address, reason, last, now)
        members = await asyncio.to_thread(self._store.members, active.run.run_id)
        data = await asyncio.to_thread(self._resources.blobs.read, undone.model)
        records = tuple(member.record for member in members)
        model = unpack_model(active.graph, data).after(undone.round, undone.bit_widths, records)
        active.merged(undone, model, members)
        current.say("rounds undone", level=logging.WARNING, reason=reason)
        current.cancel(stored.trained.seats_in("updated"), reason, stored.trained.address)
        kept = await asyncio.to_thread(self._store.round, undone.run_id, undone.ready)
        if kept.metrics[UNDONE_IN_A_ROW] % MAX_FAILURES == 0:
            await self.pause(f"{reason}; so did {MAX_FAILURES} models in a row")
        await asyncio.to_thread(self._resources.sweep)

    async def pause(self, reason: str) -> None:
        """The run waits for the operator, unless it is over."""
        active = self._round.active
        if active.run.ended is None:
            active.run = await asyncio.to_thread(self._store.pause_run, active.run.run_id, reason)
            self._round.say("run paused", level=logging.ERROR, reason=reason)

    async def with_lost(self, error: BlobError) -> None:
        """An answer that cannot be read is asked for again; of another blob the error is raised."""
        current = self._round
        lost = next((seat for seat, answer in current.stored.answers() if answer.payload == error.name), None)
        if lost is None:
            raise error
        address, seconds = current.stored.address, current.work.seconds or None
        deadline = None if seconds is None else self._resources.clock() + seconds
        reason = "the server has lost its answer"
        await current.change(lambda: self._store.ask_again(address, lost.client, reason, deadline))
        current.time.restart(seconds)
        current.say("an answer is asked for again", level=logging.ERROR, client=lost.client, error=str(error))
        current.assign()


def tell_held(run: Run, error: Exception) -> str:
    """Why the run cannot go on, which the log now has; with a traceback if nobody foresaw it."""
    reason = str(error) or type(error).__name__
    trace = None if isinstance(error, (BlobError, ReplayError, ConfigError)) else error
    log.error("the run cannot go on", exc_info=trace, extra=with_facts({"run": run.name, "error": reason}))
    return reason
