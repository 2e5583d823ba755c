"""Rounds, calibrations and the seats in them, in SQL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, delete, func, insert, select, update

from fedmpq.server.database import members as members_table
from fedmpq.server.database import rounds, runs
from fedmpq.server.database import seats as seats_table
from fedmpq.server.store.commits import add_to_members, add_to_run, carry_over
from fedmpq.server.store.errors import StoreError, UnknownRound
from fedmpq.server.store.history import fold_old_seats, unfold
from fedmpq.server.store.records import (
    LEFT,
    CalibrationCommit,
    CalibrationRound,
    Member,
    Round,
    RoundAddress,
    Run,
    Seat,
    SeatState,
    TrainingCommit,
    TrainingRound,
)
from fedmpq.server.store.rows import seat_of
from fedmpq.server.store.runs import read_run
from fedmpq.server.store.transactions import Transactions


class SqlRounds(Transactions):
    """`Rounds` in a database."""

    def open_round(
        self,
        run_id: str,
        number: int,
        *,
        target: int,
        deadline: float | None,
        bit_widths: Sequence[int],
        members: Iterable[Member],
        seats: Sequence[Seat],
        now: float,
    ) -> TrainingRound:
        address = RoundAddress(run_id, number)
        with self._write() as connection:
            begun = connection.execute(
                update(runs)
                .where(
                    runs.c.run_id == run_id,
                    runs.c.round == number - 1,
                    runs.c.state.in_(("waiting", "running")),
                )
                .values(state="running", reason="", bit_widths=bytes(bit_widths))
            )
            if begun.rowcount != 1:
                raise StoreError(f"{address} cannot open: the run has moved on")
            _open(connection, address, target, deadline, now)
            _seat(connection, address, members, seats)
            return _read_training(connection, address)

    def open_calibration(
        self, run_id: str, number: int, *, deadline: float | None, seats: Sequence[Seat], now: float
    ) -> CalibrationRound:
        address = RoundAddress(run_id, number, "calibration")
        with self._write() as connection:
            due = select(runs.c.run_id).where(
                runs.c.run_id == run_id,
                runs.c.round == number,
                runs.c.ready < number,
                runs.c.state == "running",
            )
            if connection.execute(due).one_or_none() is None:
                raise StoreError(f"{address} cannot open: it is not due")
            _open(connection, address, len(seats), deadline, now)
            _seat(connection, address, (), seats)
            return _read_calibration(connection, address)

    def reopen_round(
        self,
        address: RoundAddress,
        *,
        deadline: float | None,
        extended: bool,
        cut: Iterable[int],
        reason: str,
        members: Iterable[Member],
        seats: Sequence[Seat],
    ) -> Round:
        with self._write() as connection:
            changed = connection.execute(
                update(rounds)
                .where(is_open(address))
                .values(deadline=deadline, extended=rounds.c.extended + int(extended))
            )
            if changed.rowcount != 1:
                raise StoreError(f"{address} is not open")
            _cut(connection, address, reason, cut)
            for seat in seats:
                connection.execute(
                    delete(seats_table).where(is_seat(address, seat.client), seats_table.c.state.in_(LEFT))
                )
            _seat(connection, address, members, seats)
            return read_round(connection, address)

    def close_round(self, address: RoundAddress, reason: str) -> Round:
        with self._write() as connection:
            lock_round(connection, address)
            waiting = select(seats_table.c.client).where(has_seat(address), seats_table.c.state == "selected")
            _cut(connection, address, reason, connection.execute(waiting).scalars().all())
            return read_round(connection, address)

    def current_round(self, run_id: str) -> Round | None:
        chosen = select(rounds.c.round, rounds.c.phase).where(
            rounds.c.run_id == run_id, rounds.c.state == "open"
        )
        with self._read() as connection:
            row = connection.execute(chosen).one_or_none()
            return None if row is None else read_round(connection, RoundAddress(run_id, row.round, row.phase))

    def round(self, run_id: str, number: int) -> TrainingRound:
        with self._read() as connection:
            return _read_training(connection, RoundAddress(run_id, number))

    def last_metrics(self, run_id: str, count: int) -> list[dict[str, Any]]:
        chosen = (
            select(rounds.c.metrics)
            .where(rounds.c.run_id == run_id, rounds.c.phase == "training", rounds.c.metrics.is_not(None))
            .order_by(rounds.c.round.desc())
            .limit(count)
        )
        with self._read() as connection:
            return [json.loads(text) for text in connection.execute(chosen).scalars()]

    def calibration(self, run_id: str, number: int) -> CalibrationRound | None:
        address = RoundAddress(run_id, number, "calibration")
        with self._read() as connection:
            if connection.execute(select(rounds.c.round).where(is_round(address))).one_or_none() is None:
                return None
            return _read_calibration(connection, address)

    def seat_of(self, address: RoundAddress, client_id: str) -> Seat | None:
        known = select(members_table.c.client).where(
            members_table.c.run_id == address.run_id, members_table.c.client_id == client_id
        )
        with self._read() as connection:
            client = connection.execute(known).scalar_one_or_none()
            return None if client is None else _find_sent(connection, address, client)

    def decline(self, address: RoundAddress, client: int, reason: str) -> bool:
        with self._write() as connection:
            return _end_seat(connection, address, client, "declined", reason)

    def reject_answer(self, address: RoundAddress, client: int, reason: str) -> bool:
        with self._write() as connection:
            rejected = _end_seat(connection, address, client, "rejected", reason)
            if rejected:
                connection.execute(
                    update(members_table)
                    .where(members_table.c.run_id == address.run_id, members_table.c.client == client)
                    .values(strikes=members_table.c.strikes + 1)
                )
        return rejected

    def commit_round(self, run_id: str, result: TrainingCommit, now: float) -> Run:
        address = RoundAddress(run_id, result.round)
        with self._write() as connection:
            sent = read_run(connection, run_id).model
            _close(connection, address)
            _keep_model(connection, address, result.model, result.metrics)
            widths = {
                record.client: {"dealt": _as_bytes(record.dealt), "returned": _as_bytes(record.returned)}
                for record in result.records
            }
            add_to_members(connection, run_id, result, widths)
            moved: dict[str, Any] = {"round": result.round, "bit_widths": bytes(result.bit_widths)}
            moved |= {"ready": result.round} if result.ready else {}
            add_to_run(connection, address, result, moved, now)
            if (carried := result.carried) is not None:
                _open(connection, RoundAddress(run_id, result.round + 1), carried.target, None, now)
                for client, reason in carried.dropped.items():
                    _cut(connection, address, reason, [client])
                carry_over(connection, address, carried.merged, sent)
            fold_old_seats(connection, run_id, result.round)
            return read_run(connection, run_id)

    def commit_calibration(self, run_id: str, result: CalibrationCommit, now: float) -> Run:
        address = RoundAddress(run_id, result.round, "calibration")
        with self._write() as connection:
            _close(connection, address)
            _keep_model(connection, RoundAddress(run_id, result.round), result.model, result.metrics)
            concerned = result.accuracies.keys() | result.bytes_up.keys() | result.bytes_down.keys()
            add_to_members(connection, run_id, result, {client: {} for client in concerned})
            add_to_run(connection, address, result, {"ready": result.round}, now)
            return read_run(connection, run_id)


def lock_round(connection: Connection, address: RoundAddress) -> bool:
    """Whether the round is open. Front-ends that bring answers (`store.answers`) are waited for, and the next
    ones wait until the transaction is over."""
    chosen = select(rounds.c.round).where(is_open(address)).with_for_update()
    return connection.execute(chosen).one_or_none() is not None


# Which rows


def is_round(address: RoundAddress) -> ColumnElement[bool]:
    return and_(
        rounds.c.run_id == address.run_id, rounds.c.round == address.number, rounds.c.phase == address.phase
    )


def is_open(address: RoundAddress) -> ColumnElement[bool]:
    return and_(is_round(address), rounds.c.state == "open")


def has_seat(address: RoundAddress) -> ColumnElement[bool]:
    return and_(
        seats_table.c.run_id == address.run_id,
        seats_table.c.round == address.number,
        seats_table.c.phase == address.phase,
    )


def is_seat(address: RoundAddress, client: int) -> ColumnElement[bool]:
    return and_(has_seat(address), seats_table.c.client == client)


# Steps of a transaction


def _open(
    connection: Connection, address: RoundAddress, target: int, deadline: float | None, now: float
) -> None:
    connection.execute(
        insert(rounds).values(
            run_id=address.run_id,
            round=address.number,
            phase=address.phase,
            state="open",
            target=target,
            opened=now,
            deadline=deadline,
            extended=0,
        )
    )


def _seat(
    connection: Connection, address: RoundAddress, members: Iterable[Member], seats: Sequence[Seat]
) -> None:
    """These clients take part in the run, and those are in the round as well."""
    _take_in(connection, address.run_id, list(members))
    new_seats = [
        {
            "run_id": address.run_id,
            "round": address.number,
            "phase": address.phase,
            "client": seat.client,
            "state": seat.state,
            "reason": seat.reason,
            "bit_widths": bytes(seat.bit_widths),
            "payload": seat.payload,
            "payload_bytes": seat.payload_bytes,
            "version": seat.version,
        }
        for seat in seats
    ]
    if new_seats:
        connection.execute(insert(seats_table), new_seats)


_UPDATE_MEMBER = (
    update(members_table)
    .where(members_table.c.run_id == bindparam("of_run"), members_table.c.client == bindparam("of_client"))
    .values(budget=bindparam("new_budget"), samples=bindparam("new_samples"))
)


def _take_in(connection: Connection, run_id: str, members: Sequence[Member]) -> None:
    """Budgets and samples of clients in the run, and clients that are new to it."""
    if not members:
        return
    in_run = select(members_table.c.client, members_table.c.client_id).where(members_table.c.run_id == run_id)
    known = {(row.client, row.client_id) for row in connection.execute(in_run)}
    old = [
        {
            "of_run": run_id,
            "of_client": member.client,
            "new_budget": member.record.budget,
            "new_samples": member.record.samples,
        }
        for member in members
        if (member.client, member.client_id) in known
    ]
    new = [
        {
            "run_id": run_id,
            "client": member.client,
            "client_id": member.client_id,
            "budget": member.record.budget,
            "samples": member.record.samples,
            "strikes": 0,
            "bytes_up": 0,
            "bytes_down": 0,
        }
        for member in members
        if (member.client, member.client_id) not in known
    ]
    if old:
        connection.execute(_UPDATE_MEMBER, old)
    if new:
        connection.execute(insert(members_table), new)


def _cut(connection: Connection, address: RoundAddress, reason: str, cut: Iterable[int]) -> None:
    for client in cut:
        _end_seat(connection, address, client, "cut", reason)


def _end_seat(
    connection: Connection, address: RoundAddress, client: int, state: SeatState, reason: str
) -> bool:
    """Whether the client had a place to lose."""
    waiting = and_(is_seat(address, client), seats_table.c.state == "selected")
    changed = connection.execute(update(seats_table).where(waiting).values(state=state, reason=reason))
    return changed.rowcount == 1


def _close(connection: Connection, address: RoundAddress) -> None:
    closed = connection.execute(update(rounds).where(is_open(address)).values(state="committed"))
    if closed.rowcount != 1:
        raise StoreError(f"{address} is not open")


def _keep_model(
    connection: Connection, trained: RoundAddress, model: bytes, metrics: Mapping[str, Any]
) -> None:
    """What the round has made, and what is known of it."""
    text = json.dumps(metrics, allow_nan=False)
    connection.execute(update(rounds).where(is_round(trained)).values(metrics=text, model=model))


def _as_bytes(widths: tuple[int, ...] | None) -> bytes | None:
    return None if widths is None else bytes(widths)


# Reading


def read_round(connection: Connection, address: RoundAddress) -> Round:
    if address.phase == "training":
        return _read_training(connection, address)
    return _read_calibration(connection, address)


def _read_training(connection: Connection, address: RoundAddress) -> TrainingRound:
    row = _row(connection, address)
    return TrainingRound(
        **_common(connection, address, row),
        target=row.target,
        metrics={} if row.metrics is None else json.loads(row.metrics),
        model=row.model,
    )


def _read_calibration(connection: Connection, address: RoundAddress) -> CalibrationRound:
    trained = _read_training(connection, RoundAddress(address.run_id, address.number))
    return CalibrationRound(**_common(connection, address, _row(connection, address)), trained=trained)


def _row(connection: Connection, address: RoundAddress) -> Row[Any]:
    row = connection.execute(select(rounds).where(is_round(address))).one_or_none()
    if row is None:
        raise UnknownRound(f"{address} has not begun")
    return row


def _common(connection: Connection, address: RoundAddress, row: Row[Any]) -> dict[str, Any]:
    return {
        "address": address,
        "state": row.state,
        "opened": row.opened,
        "deadline": row.deadline,
        "extended": row.extended,
        "failures": row.failures,
        "seats": _seats(connection, address, row.folded_seats),
    }


def _seats(connection: Connection, address: RoundAddress, folded: bytes | None) -> tuple[Seat, ...]:
    if folded is not None:
        return unfold(folded)
    seated = connection.execute(select(seats_table).where(has_seat(address)).order_by(seats_table.c.client))
    return tuple(seat_of(seat) for seat in seated)


def find_seat(connection: Connection, address: RoundAddress, client: int) -> Seat | None:
    row = connection.execute(select(seats_table).where(is_seat(address, client))).one_or_none()
    if row is not None:
        return seat_of(row)
    folded = connection.execute(select(rounds.c.folded_seats).where(is_round(address))).scalar_one_or_none()
    seats = () if folded is None else unfold(folded)
    return next((seat for seat in seats if seat.client == client), None)


def _find_sent(connection: Connection, address: RoundAddress, client: int) -> Seat | None:
    """The client's place that was sent its work in that round; the changes of an asynchronous run may be
    merged as many rounds later as its staleness_limit says."""
    config = json.loads(
        connection.execute(select(runs.c.config).where(runs.c.run_id == address.run_id)).scalar_one()
    )
    if config.get("asynchronous") is None:
        return find_seat(connection, address, client)
    last = select(func.max(rounds.c.round)).where(rounds.c.run_id == address.run_id)
    newest = connection.execute(last).scalar() or 0
    for number in range(address.number, min(newest, address.number + config["staleness_limit"] + 1) + 1):
        here = RoundAddress(address.run_id, number, address.phase)
        seat = find_seat(connection, here, client)
        if seat is not None and here.sent(seat) == address:
            return seat
    return None
