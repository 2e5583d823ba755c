"""How a round begins: wait for its clients, deal to them, and store who is in it before anyone is told."""

from __future__ import annotations

import asyncio

from fedmpq.server.active_run import ActiveRun
from fedmpq.server.agreed_range import agree, is_open
from fedmpq.server.buffer_in_progress import BufferInProgress
from fedmpq.server.buffered_work import BufferedWork
from fedmpq.server.calibration_work import CalibrationWork
from fedmpq.server.collecting import LOOK_SECONDS
from fedmpq.server.learned_deadline import slowest_answers
from fedmpq.server.opened_work import training_work, work_of
from fedmpq.server.pace import Pace
from fedmpq.server.places import may_begin, selectable
from fedmpq.server.readiness import describe_to_all
from fedmpq.server.resources import Resources
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.round_work import RoundWork, Seating, TrainingWork
from fedmpq.server.store.records import Client, Member, Round, Run, TrainingRound


async def take_up(resources: Resources, active: ActiveRun, stored: Round) -> RoundInProgress:
    """A round that was open when the server ended; what its clients may want to download is there again."""
    slowest = await asyncio.to_thread(slowest_answers, resources.store, active.run.run_id)
    work = work_of(active, stored, slowest)
    await resources.workers.merge(work.make_payloads_again, stored.seats, resources.outgoing)
    taken_up = _in_progress(resources, work, stored, new=False)
    await taken_up.keep_time()
    return taken_up


async def open_next(resources: Resources, active: ActiveRun) -> RoundInProgress:
    """The calibration of what the last round made if it is due, or else the next round.

    Waits while the run is paused. Raises StoreError if it was paused or aborted while the round was planned.
    """
    if active.calibration_due:
        return await _open_calibration(resources, active)
    return await _open_training(resources, active)


async def _open_training(resources: Resources, active: ActiveRun) -> RoundInProgress:
    connected = await _enough_clients(resources, active)
    began = resources.clock()
    slowest = await asyncio.to_thread(slowest_answers, resources.store, active.run.run_id)
    work, seating = await resources.workers.merge(
        training_work(active).plan, active, connected, resources.outgoing, slowest
    )
    opened, members, run = await asyncio.to_thread(_store_opening, resources, work, seating, began)
    active.seated(work.model.bit_widths, members)
    active.run = run
    return _in_progress(resources, work, opened, new=True)


def _in_progress(resources: Resources, work: RoundWork, stored: Round, *, new: bool) -> RoundInProgress:
    if isinstance(work, BufferedWork):
        return BufferInProgress(resources, work, stored, new=new)
    return RoundInProgress(resources, work, stored, new=new)


def _store_opening(
    resources: Resources, work: TrainingWork, seating: Seating, began: float
) -> tuple[TrainingRound, list[Member], Run]:
    store, run_id = resources.store, work.address.run_id
    opened = store.open_round(
        run_id,
        work.address.number,
        target=work.target,
        deadline=work.deadline(resources.clock()),
        bit_widths=work.model.bit_widths,
        members=seating.members,
        seats=seating.seats,
        now=began,
    )
    return opened, store.members(run_id), store.run(run_id)


async def _open_calibration(resources: Resources, active: ActiveRun) -> RoundInProgress:
    await _not_paused(resources, active)
    run_id, number = active.run.run_id, active.model.round
    trained = await asyncio.to_thread(resources.store.round, run_id, number)
    work, now = CalibrationWork(active, trained), resources.clock()
    seats = await resources.workers.merge(work.deal_to_all, resources.outgoing)
    opened = await asyncio.to_thread(
        resources.store.open_calibration,
        run_id,
        number,
        deadline=work.deadline(now),
        seats=seats,
        now=now,
    )
    return RoundInProgress(resources, work, opened, new=True)


async def _not_paused(resources: Resources, active: ActiveRun) -> None:
    """Until the operator has resumed the run."""
    while True:
        seen = resources.connections.changed.count
        resources.check_run(active.run)
        if active.run.state != "paused":
            return
        resources.waiting_for = "the operator"
        await resources.connections.changed.wait(seen)


async def _enough_clients(resources: Resources, active: ActiveRun) -> list[Client]:
    """Those a round can select from, once there are enough and the run is not paused."""
    pace = Pace()
    while True:
        seen = resources.connections.changed.count
        resources.check_run(active.run)
        pace.begin()
        await agree(resources, active)
        if not is_open(active):
            describe_to_all(resources.connections, active)
        # Also while it is paused: clients that were revoked are shut out at once.
        ready = await selectable(resources, active)
        if active.run.state == "paused":
            resources.waiting_for = "the operator"
        elif is_open(active):
            pass
        elif await may_begin(resources, active, ready):
            return ready
        else:
            resources.waiting_for = _too_few(active, len(ready))
        pace.end()
        await resources.connections.changed.wait(seen, LOOK_SECONDS)
        await pace.rest()


def _too_few(active: ActiveRun, ready: int) -> str:
    config = active.config
    words = f"{ready} of {config.least_clients} clients ready"
    if active.members and config.min_clients is None and config.deadline_seconds != 0:
        words += f"; the run goes on without those who stay away for {config.away_seconds:g} s"
    return words
