"""The state machine of a run: select, deal, train, merge, calibrate; then the next round, then the next run.

Everything it knows is stored before it acts on it, so that after a crash it reads the facts again and goes
on: the open round has the same clients, their payloads are made again, and the updates that were acknowledged
are there. It lives in the event loop and hands what blocks to threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import digest, phase_to_message, plan_to_message
from fedmpq.method.aggregate import MergeError
from fedmpq.method.state import GlobalModel
from fedmpq.proto import federation_pb2
from fedmpq.server.active_run import ActiveRun, ReplayError, Sent
from fedmpq.server.blobs import BlobError, Blobs, Outgoing
from fedmpq.server.connections import Announcement, Connection, Hub
from fedmpq.server.exports import ExportFailed, Exports
from fedmpq.server.store import (
    ENDED,
    CalibrationCommit,
    Member,
    Round,
    RoundCommit,
    Run,
    Seat,
    Store,
    StoreError,
    UpdateRefused,
)
from fedmpq.server.validation import Rejected
from fedmpq.system.logs import say

T = TypeVar("T")
Commit = RoundCommit | CalibrationCommit
Changes = tuple[Run, GlobalModel, list[Member]]
"""What a run has become."""
log = logging.getLogger("fedmpq.server")

CHECKS_AT_ONCE = 2
"""Uploads that are parsed at the same time: each needs memory for a model."""
RETRY_SECONDS = 5.0
AWAY_SECONDS = 60.0
"""A calibration that has statistics of others waits no longer for boards that are not connected."""


class Stopped(Exception):
    """The server is stopping."""


class Ended(Exception):
    """The run at work was aborted."""


class DamagedUpload(RuntimeError):
    """The bytes that arrived have another hash than announced, perhaps for a fault of the server's disk."""


@dataclass
class Tally:
    """Counts since the server started, for the metrics."""

    rounds: int = 0
    calibrations: int = 0
    updates: int = 0
    rejected: int = 0
    cut: int = 0
    extended: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    round_seconds: float = 0.0


@dataclass
class OpenRound:
    """The open round as the store has it, and what its clients are doing."""

    round: Round
    since: float
    """When this process began to wait for its clients."""
    doing: dict[int, str] = field(default_factory=dict)
    """By client: "training", "measuring" or "uploading"; only for the operator's eyes."""

    def seats(self, state: str) -> list[Seat]:
        return [seat for seat in self.round.seats if seat.state == state]

    def seat(self, client: int) -> Seat | None:
        return next((seat for seat in self.round.seats if seat.client == client), None)

    def change(self, changed: Seat) -> None:
        seats = tuple(changed if seat.client == changed.client else seat for seat in self.round.seats)
        self.round = replace(self.round, seats=seats)


class Coordinator:
    """Conducts the runs in the store, one after the other."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        outgoing: Outgoing,
        hub: Hub,
        exports: Exports,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.blobs = blobs
        self.outgoing = outgoing
        self.hub = hub
        self.exports = exports
        self.clock = clock
        self.active: ActiveRun | None = None
        self.open: OpenRound | None = None
        self.waiting_for = ""
        """What the run at work waits for, for the operator's eyes."""
        self.loading = True
        """The run at work is still being read from the store: what seems not to be there may come."""
        self.tally = Tally()
        self._last: Run | None = None
        """The run that ended last, and its clients that do not know it yet."""
        self._untold: set[str] = set()
        self._stopping = False
        # Threads of their own: the allocator keeps, for each thread, what its largest piece of work needed.
        self._checkers = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="check")
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merge")
        # What the store says of the open round, and `open`, change together.
        self._round_lock = asyncio.Lock()
        self._blobs_once_used: set[bytes] = set()
        self._uninterrupted: set[asyncio.Task[Any]] = set()

    # The loop

    async def conduct(self, exit_when_done: bool) -> None:
        """Run after run, until told to stop, or until none is left if `exit_when_done`."""
        self._blobs_once_used = await asyncio.to_thread(self.store.blobs_in_use)
        await self._remember_last()
        if self._last is not None:
            # A server that was killed may not have come to it; no later run has begun before.
            await self._export(self._last)
        try:
            while True:
                seen = self.hub.changed.count
                self._check_stop()
                run = await asyncio.to_thread(self.store.next_run)
                if run is not None:
                    await self._conduct_run(run)
                    continue
                self.loading = False
                if exit_when_done:
                    return
                await self.hub.changed.wait(seen)
        except Stopped:
            return

    def stop(self) -> None:
        """Begin nothing new; `conduct` returns when what is under way is stored."""
        self._stopping = True
        self.hub.changed.ring()

    async def _heavy(self, work: Callable[..., T], *arguments: Any) -> T:
        """Work on whole models, one piece at a time."""
        call = partial(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._merger, call)

    def _check_stop(self) -> None:
        if self._stopping:
            raise Stopped

    def _check_control(self) -> ActiveRun:
        self._check_stop()
        assert self.active is not None
        if self.active.run.state in ENDED:
            raise Ended
        return self.active

    async def _conduct_run(self, run: Run) -> None:
        """One run to its end. A disk or database that fails is tried again, from the stored facts."""
        try:
            self.loading = True
            await self._load(run)
            self.loading = False
            await self._rounds()
        except Ended:
            pass
        except (OSError, DBAPIError) as error:
            say(log, "the store failed; trying again", level=logging.ERROR, run=run.name, error=str(error))
            self.loading, self.open = True, None
            await self._pause_before_retry()
            return
        except (BlobError, MergeError, ReplayError) as error:
            say(log, "the run cannot go on", level=logging.ERROR, run=run.name, error=str(error))
            await asyncio.to_thread(self.store.abort_run, run.run_id, str(error), self.clock())
        await self._finish(run.run_id)

    async def _pause_before_retry(self) -> None:
        end = time.monotonic() + RETRY_SECONDS
        while (left := end - time.monotonic()) > 0:
            seen = self.hub.changed.count
            self._check_stop()
            await self.hub.changed.wait(seen, left)

    async def _load(self, run: Run) -> None:
        self.active = await self._heavy(ActiveRun.load, self.store, self.blobs, self.outgoing, run)
        stored = await asyncio.to_thread(self.store.current_round, run.run_id)
        if stored is None:
            await asyncio.to_thread(self.outgoing.keep_only, ())
            return
        await self._heavy(self.active.take_up, stored)
        self.open = OpenRound(stored, self.clock())
        say(log, f"{stored.phase} goes on", run=run.name, round=stored.round, **_counts(stored))
        for seat in self.open.seats("selected"):
            self._assign(seat)

    async def _rounds(self) -> None:
        while (active := self._check_control()).run.state != "finished":
            if self.open is None:
                await (self._open_calibration() if active.calibration_due else self._open_round())
            else:
                await self._collect()
                await self._merge()

    async def _export(self, run: Run) -> None:
        """The model files the run asks for. It is finished without them too, so a failure is only told."""
        wanted = run.config.get("export", ()) if run.state == "finished" else ()
        if all(self.exports.has(run, each) for each in wanted):
            return
        self.waiting_for = "the export"
        try:
            made = [await self.exports.make(run, each) for each in wanted]
        except (ExportFailed, OSError) as error:
            say(log, "no model files", level=logging.ERROR, run=run.name, error=str(error))
        else:
            say(log, "model files made", run=run.name, files=sum(map(len, made)))

    async def _finish(self, run_id: str) -> None:
        """Tell everyone that the run is over and forget what only it needed."""
        run = await asyncio.to_thread(self.store.run, run_id)
        await self._export(run)
        if self.open is not None:
            self._tell_cancelled(self.open.seats("selected"), "the run was aborted")
        self.active = self.open = None
        await self._remember_last()
        for client in self.hub.connected():
            if (connection := self.hub.get(client.client_id)) is not None:
                self._tell_ended(connection)
        await asyncio.to_thread(self._sweep, [])
        say(log, f"run {run.state}", run=run.name, rounds=run.round, reason=run.reason or None)
        self.hub.changed.ring()

    # Opening a round

    async def _open_round(self) -> None:
        active = self._check_control()
        connected = await self._wait_for_clients()
        began = self.clock()
        plan = await self._heavy(active.plan_round, connected)
        try:
            opened, members, run = await asyncio.to_thread(
                self._store_opening,
                run_id=active.run.run_id,
                number=active.next_round,
                target=plan.target,
                deadline=self._deadline(self.clock()),
                bit_widths=plan.bit_widths,
                joining=plan.joining,
                seats=plan.seats,
                now=began,
            )
        except StoreError:
            # Paused or aborted while the round was planned?
            await self._reread(active)
            return
        active.seated(plan, members)
        active.run = run
        self._opened(opened)

    def _opened(self, opened: Round) -> None:
        self.open = OpenRound(opened, self.clock())
        self.waiting_for = ""
        for seat in opened.seats:
            self._assign(seat)
        self.hub.changed.ring()

    async def _open_calibration(self) -> None:
        """Have the statistics measured of what the last round made."""
        active = self._check_control()
        if active.run.state == "paused":
            await self._while_paused()
            return
        trained = await asyncio.to_thread(self.store.round, active.run.run_id, active.model.round)
        assert trained is not None
        now = self.clock()
        try:
            opened = await asyncio.to_thread(
                self.store.open_calibration,
                active.run.run_id,
                active.model.round,
                deadline=self._deadline(now, "calibration"),
                seats=await self._heavy(active.plan_calibration, trained.seats),
                now=now,
            )
        except StoreError:
            await self._reread(active)
            return
        self._opened(opened)

    async def _while_paused(self) -> None:
        self.waiting_for = "the operator"
        await self.hub.changed.wait(self.hub.changed.count)

    def _store_opening(self, run_id: str, number: int, **opening: Any) -> tuple[Round, list[Member], Run]:
        opened = self.store.open_round(run_id, number, **opening)
        return opened, self.store.members(run_id), self.store.run(run_id)

    async def _reread(self, active: ActiveRun) -> None:
        """The store refused a step; that is in order if the operator stopped the run, and a fault if not."""
        run = await asyncio.to_thread(self.store.run, active.run.run_id)
        if run.state == "running" or run.round != active.model.round:
            raise ReplayError(
                f"run {run.name!r} is not as this server left it; is another one at work on it?"
            )
        active.run = run

    async def _wait_for_clients(self) -> list[Announcement]:
        """Those a round can select from, once there are enough and the run is not paused."""
        while True:
            seen = self.hub.changed.count
            active = self._check_control()
            ready = await self._ready(active)
            least = active.config.least_clients
            if active.run.state == "paused":
                self.waiting_for = "the operator"
            elif len(ready) >= least:
                return ready
            else:
                self.waiting_for = f"{len(ready)} of {least} clients connected"
            await self.hub.changed.wait(seen)

    async def _ready(self, active: ActiveRun) -> list[Announcement]:
        """Connected clients that may be selected; the streams of those revoked meanwhile end."""
        connected = self.hub.connected()
        if not connected:
            return []
        allowed = await asyncio.to_thread(self.store.unrevoked, [client.client_id for client in connected])
        for client in connected:
            connection = self.hub.get(client.client_id)
            if client.client_id not in allowed and connection is not None:
                connection.close("revoked")
        return [client for client in connected if client.client_id in allowed and active.may_train(client)]

    def _deadline(self, now: float, phase: Phase = "training") -> float | None:
        assert self.active is not None
        config = self.active.config
        seconds = config.deadline_seconds if phase == "training" else config.calibration_seconds
        return now + seconds if seconds else None

    # Collecting updates

    async def _collect(self) -> None:
        """Until the round can close."""
        while True:
            seen = self.hub.changed.count
            active = self._check_control()
            assert self.open is not None
            current, needed = self.open.round, self._needed(active)
            updated, pending = len(self.open.seats("updated")), self.open.seats("selected")
            late = current.deadline is not None and self.clock() >= current.deadline
            if updated >= needed and (not pending or late or self._enough(active, pending)):
                return
            if late:
                await self._extend(needed - updated)
                continue
            if (missing := needed - updated - len(pending)) > 0 and await self._refill(missing):
                continue
            calibrating = current.phase == "calibration"
            what = f"statistics of {len(current.seats)}" if calibrating else f"{needed} updates"
            self.waiting_for = f"{updated} of {what}"
            moments = [self.open.since + AWAY_SECONDS] if calibrating else []
            moments += [] if current.deadline is None else [current.deadline]
            ahead = [moment - self.clock() for moment in moments if moment > self.clock()]
            await self.hub.changed.wait(seen, min(ahead, default=None))

    def _needed(self, active: ActiveRun) -> int:
        """Answers without which the open round does not close."""
        assert self.open is not None
        current = self.open.round
        return active.config.needed(current.target) if current.phase == "training" else 1

    def _enough(self, active: ActiveRun, pending: Sequence[Seat]) -> bool:
        """Whether the open round need not wait for these clients any longer."""
        assert self.open is not None
        if self.open.round.phase == "training":
            return active.config.over_selection > 0
        away = all(self.hub.get(active.client_id(seat.client)) is None for seat in pending)
        return away and self.clock() >= self.open.since + AWAY_SECONDS

    async def _others(self) -> list[Announcement]:
        """Connected clients that have no place in the open round, or lost it."""
        active = self._check_control()
        assert self.open is not None
        places = {seat.client: seat.state for seat in self.open.round.seats}
        return [
            client
            for client in await self._ready(active)
            if (member := active.members.get(client.client_id)) is None
            or places.get(member.client, "cut") == "cut"
        ]

    async def _refill(self, missing: int) -> bool:
        """Other clients for those whose updates were rejected; False: there are none now."""
        others = await self._others()
        if others:
            assert self.open is not None
            await self._reopen(others, missing, deadline=self.open.round.deadline, extended=False, cut=())
        return bool(others)

    async def _extend(self, needed: int) -> None:
        """The deadline passed without a quorum: those who went away give up their places to others."""
        active = self._check_control()
        assert self.open is not None
        gone = [
            seat.client
            for seat in self.open.seats("selected")
            if self.hub.get(active.client_id(seat.client)) is None
        ]
        here = len(self.open.seats("selected")) - len(gone)
        others = await self._others()
        # Statistics cost little: whoever is here is asked, beside those who may yet answer.
        wanted = max(0, needed - here) if self.open.round.phase == "training" else len(others)
        count = min(len(others), wanted)
        deadline = self._deadline(self.clock(), self.open.round.phase)
        await self._reopen(others, count, deadline=deadline, extended=True, cut=gone[:count])
        self.tally.extended += 1
        say(
            log,
            "round extended",
            level=logging.WARNING,
            run=active.run.name,
            round=self.open.round.round,
            phase=self.open.round.phase,
            **_counts(self.open.round),
        )

    async def _reopen(
        self,
        others: Sequence[Announcement],
        count: int,
        *,
        deadline: float | None,
        extended: bool,
        cut: Sequence[int],
    ) -> None:
        active = self._check_control()
        assert self.open is not None
        current = self.open.round
        plan = await self._heavy(active.plan_refill, others, count) if count else None
        async with self._round_lock:
            self.open.round, members = await asyncio.to_thread(
                self._store_reopening,
                run_id=active.run.run_id,
                number=current.round,
                phase=current.phase,
                deadline=deadline,
                extended=extended,
                cut=cut,
                joining=plan.joining if plan else (),
                seats=plan.seats if plan else (),
            )
            if plan is not None:
                active.seated(plan, members)
        self.tally.cut += len(cut)
        self._tell_cancelled([seat for seat in self.open.seats("cut") if seat.client in cut])
        for new in plan.seats if plan else ():
            if (seat := self.open.seat(new.client)) is not None:
                self._assign(seat)

    def _store_reopening(self, run_id: str, number: int, **reopening: Any) -> tuple[Round, list[Member]]:
        return self.store.reopen_round(run_id, number, **reopening), self.store.members(run_id)

    # Merging

    async def _merge(self) -> None:
        active = self._check_control()
        assert self.open is not None
        if pending := self.open.seats("selected"):
            await self._close(active, pending)
        self.waiting_for = "the merge"
        closed = self.open.round
        try:
            result, changes = await self._heavy(self._commit, active, closed)
        except StoreError:
            # Aborted while it was merged?
            await self._reread(active)
            return
        active.merged(*changes)
        self.open = None
        self._count_round(active, closed, result)
        self.hub.changed.ring()

    async def _close(self, active: ActiveRun, pending: Sequence[Seat]) -> None:
        """The open round takes no more; those it waited for hear so."""
        assert self.open is not None
        current = self.open.round
        late = current.deadline is not None and self.clock() >= current.deadline
        reason = "the deadline passed" if late else "enough others were faster"
        async with self._round_lock:
            self.open.round = await asyncio.to_thread(
                self.store.close_round, active.run.run_id, current.round, reason, current.phase
            )
        cut = {seat.client for seat in pending} & {seat.client for seat in self.open.seats("cut")}
        self._tell_cancelled([seat for seat in pending if seat.client in cut], reason)
        self.tally.cut += len(cut)

    def _commit(self, active: ActiveRun, closed: Round) -> tuple[Commit, Changes]:
        """The merged round or calibration, and what the run has become."""
        commit: Commit
        with self.blobs.lock:
            if closed.phase == "training":
                model, commit = active.merge(closed, self.clock())
                run = self.store.commit_round(closed.run_id, commit, self.clock())
            else:
                trained = self.store.round(closed.run_id, closed.round)
                assert trained is not None
                model, commit = active.calibrate(trained, closed, self.clock())
                run = self.store.commit_calibration(closed.run_id, commit, self.clock())
        self._sweep([seat.update for seat in closed.seats if seat.update is not None])
        return commit, (run, model, self.store.members(run.run_id))

    def _sweep(self, updates: Iterable[bytes]) -> None:
        """Delete merged updates, models that are no longer kept, and the round's outgoing payloads."""
        with self.blobs.lock:
            for name in updates:
                self.blobs.delete(name)
            in_use = self.store.blobs_in_use()
            for name in self._blobs_once_used - in_use:
                self.blobs.delete(name)
            self._blobs_once_used = in_use
        self.outgoing.keep_only(())

    def _count_round(self, active: ActiveRun, closed: Round, commit: Commit) -> None:
        self.tally.rounds += closed.phase == "training"
        self.tally.calibrations += closed.phase == "calibration"
        self.tally.bytes_up += sum(commit.bytes_up.values())
        self.tally.bytes_down += sum(commit.bytes_down.values())
        self.tally.round_seconds += max(0.0, self.clock() - closed.opened)
        facts = {name: value for name, value in commit.metrics.items() if name not in ("bit_widths", "round")}
        say(
            log,
            "round merged" if closed.phase == "training" else "round calibrated",
            run=active.run.name,
            round=closed.round,
            of=active.config.rounds,
            **{name: value for name, value in facts.items() if value not in ({}, "", None)},
        )

    # Events

    def _assign(self, seat: Seat) -> None:
        """Send a client its work, if it is connected; if not, it gets it when it is."""
        assert self.active is not None
        connection = self.hub.get(self.active.client_id(seat.client))
        if connection is not None:
            self._send_assignment(connection, seat)

    def _send_assignment(self, connection: Connection, seat: Seat) -> None:
        assert self.active is not None
        assert self.open is not None
        active, current = self.active, self.open.round
        if connection.described != active.run.run_id:
            connection.send(self._description())
            connection.described = active.run.run_id
        left = 0.0 if current.deadline is None else max(0.001, current.deadline - self.clock())
        assignment = federation_pb2.Assignment(
            run_id=active.run.run_id,
            round=current.round,
            client=seat.client,
            seed=active.config.seed,
            payload=seat.payload,
            payload_bytes=seat.payload_bytes,
            plan=plan_to_message(active.method.recipe.plan_of(current.round)),
            seconds_left=left,
            evaluate=current.phase == "training" and active.config.test_data is None,
            bit_widths=bytes(seat.bit_widths),
            phase=phase_to_message(current.phase),
        )
        connection.send(federation_pb2.Event(assignment=assignment))

    def _description(self) -> federation_pb2.Event:
        assert self.active is not None
        active = self.active
        return federation_pb2.Event(
            run=federation_pb2.RunDescription(
                run_id=active.run.run_id,
                name=active.run.name,
                graph_id=active.run.graph,
                graph_bytes=len(active.graph_bytes),
                class_names=active.run.class_names,
                rounds=active.config.rounds,
            )
        )

    def _tell_cancelled(self, seats: Iterable[Seat], reason: str = "the deadline passed") -> None:
        """The open round goes on, or ends, without these."""
        assert self.active is not None
        assert self.open is not None
        current = self.open.round
        cancelled = federation_pb2.Cancelled(
            run_id=current.run_id, round=current.round, reason=reason, phase=phase_to_message(current.phase)
        )
        for seat in seats:
            self.hub.send(self.active.client_id(seat.client), federation_pb2.Event(cancelled=cancelled))

    def greet(self, connection: Connection) -> None:
        """What a client that has just connected must know: its unfinished work, or that the run is over."""
        client_id = connection.client.client_id
        if self.active is not None:
            member = self.active.members.get(client_id)
            if member is not None and self.open is not None:
                seat = self.open.seat(member.client)
                if seat is not None and seat.state == "selected":
                    self._send_assignment(connection, seat)
        elif client_id in self._untold:
            self._tell_ended(connection)

    async def _remember_last(self) -> None:
        """A server that was killed may not have told everyone that the run is over."""
        self._last = await asyncio.to_thread(self.store.last_ended)
        if self._last is not None:
            members = await asyncio.to_thread(self.store.members, self._last.run_id)
            self._untold = {member.client_id for member in members}

    def _tell_ended(self, connection: Connection) -> None:
        if self._last is not None and connection.client.client_id in self._untold:
            connection.send(_run_ended(self._last))
            self._untold.discard(connection.client.client_id)

    async def farewell(self, seconds: float) -> None:
        """Until every client of the last run knows that it is over, but no longer than this."""
        end = time.monotonic() + seconds
        while self._untold and (left := end - time.monotonic()) > 0:
            await self.hub.changed.wait(self.hub.changed.count, left)

    # What the services ask for

    def place(self, client_id: str, run_id: str, number: int, phase: Phase) -> Seat | None:
        """The client's seat in the open round, if that is the round it speaks of."""
        if self.active is None or self.open is None or self.active.run.run_id != run_id:
            return None
        member = self.active.members.get(client_id)
        if member is None or (self.open.round.round, self.open.round.phase) != (number, phase):
            return None
        return self.open.seat(member.client)

    def note(self, client_id: str, doing: str) -> None:
        """What a client is doing, for the operator's eyes."""
        if self.active is not None and self.open is not None and client_id in self.active.members:
            self.open.doing[self.active.members[client_id].client] = doing
            self.hub.changed.ring()

    def note_download(self, client_id: str) -> None:
        """A client has downloaded what it works on."""
        if self.open is not None:
            self.note(client_id, "training" if self.open.round.phase == "training" else "measuring")

    async def accept(
        self, client_id: str, run_id: str, number: int, phase: Phase, name: bytes, file: Path
    ) -> str:
        """Check an update or calibration that has arrived whole in `file` and make it durable; its receipt.

        Raises Rejected, UpdateRefused or DamagedUpload. Goes on to its end if the caller goes away.
        """
        return await self._to_the_end(self._accept(client_id, run_id, number, phase, name, file))

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
        self._checkers.shutdown()
        self._merger.shutdown()

    async def _accept(
        self, client_id: str, run_id: str, number: int, phase: Phase, name: bytes, file: Path
    ) -> str:
        active, current, seat = self.active, self.open, self.place(client_id, run_id, number, phase)
        if active is None or current is None or seat is None:
            raise UpdateRefused(f"round {number} is over, or this client is not in it")
        announced = self.hub.get(client_id)
        samples = max(active.members[client_id].samples, announced.client.samples if announced else 0)
        try:
            check = partial(self._check_and_keep, active, active.sent, seat, samples, name, file)
            size = await asyncio.get_running_loop().run_in_executor(self._checkers, check)
        except Rejected as rejected:
            await self._reject(active, current, seat, str(rejected))
            raise
        async with self._round_lock:
            try:
                receipt = await asyncio.to_thread(
                    self.store.add_update, run_id, number, seat.client, name, size, phase
                )
            except UpdateRefused:
                await asyncio.to_thread(self.blobs.delete, name)
                raise
            if (known := current.seat(seat.client)) is not None and known.state == "selected":
                current.change(
                    replace(known, state="updated", update=name, update_bytes=size, receipt_id=receipt)
                )
                self.tally.updates += 1
        self.hub.changed.ring()
        return receipt

    def _check_and_keep(
        self, active: ActiveRun, sent: Sent, seat: Seat, max_samples: int, name: bytes, file: Path
    ) -> int:
        """The size of an update that is good, and now durable as a blob."""
        data = file.read_bytes()
        if digest(data) != name:
            raise DamagedUpload("the bytes that arrived have another hash than the header says")
        active.check(sent, data, seat, max_samples)
        self.blobs.adopt(file, name)
        return len(data)

    async def reject(self, client_id: str, run_id: str, number: int, phase: Phase, reason: str) -> None:
        """Count a bad upload against its sender."""
        seat = self.place(client_id, run_id, number, phase)
        if self.active is not None and self.open is not None and seat is not None:
            await self._to_the_end(self._reject(self.active, self.open, seat, reason))

    async def _reject(self, active: ActiveRun, current: OpenRound, seat: Seat, reason: str) -> None:
        run_id, number, phase = active.run.run_id, current.round.round, current.round.phase
        async with self._round_lock:
            rejected = await asyncio.to_thread(
                self.store.reject_update, run_id, number, seat.client, reason, phase
            )
            if not rejected:
                return
            current.change(replace(seat, state="rejected", reason=reason))
            client_id = active.client_id(seat.client)
            member = active.members[client_id]
            active.members[client_id] = replace(member, strikes=member.strikes + 1)
        self.tally.rejected += 1
        say(
            log,
            f"{'update' if phase == 'training' else 'calibration'} rejected",
            level=logging.WARNING,
            run=active.run.name,
            round=number,
            client=seat.client,
            reason=reason,
        )
        self.hub.changed.ring()

    # What the operator asks for

    async def pause(self, run_id: str) -> Run:
        return self._controlled(await asyncio.to_thread(self.store.pause_run, run_id))

    async def resume(self, run_id: str) -> Run:
        return self._controlled(await asyncio.to_thread(self.store.resume_run, run_id))

    async def abort(self, run_id: str) -> Run:
        run = await asyncio.to_thread(self.store.abort_run, run_id, "aborted by the operator", self.clock())
        return self._controlled(run)

    def _controlled(self, run: Run) -> Run:
        if self.active is not None and self.active.run.run_id == run.run_id:
            self.active.run = run
        say(log, f"run {run.state}", run=run.name, reason=run.reason or None)
        self.hub.changed.ring()
        return run


def _counts(current: Round) -> dict[str, int]:
    states = [seat.state for seat in current.seats]
    return {"selected": len(states), "updates": states.count("updated"), "rejected": states.count("rejected")}


def _run_ended(run: Run) -> federation_pb2.Event:
    return federation_pb2.Event(run_ended=federation_pb2.RunEnded(run_id=run.run_id, state=run.state))
