"""Rounds whose answers cannot be merged, or cannot be read again, in SQL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, insert, select, update

from fedmpq.server.database import members, rounds, runs, seats, thrown_out
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.records import Round, RoundAddress, Run, ThrownOut
from fedmpq.server.store.rounds import has_seat, is_open, is_seat, lock_round, read_round
from fedmpq.server.store.runs import read_run
from fedmpq.server.store.transactions import Transactions

UNDONE_IN_A_ROW = "undone_in_a_row"
"""In a round's metrics: how many models in a row were not worth keeping, its own included."""


class SqlFailedMerges(Transactions):
    """`FailedMerges` in a database."""

    def throw_out(self, address: RoundAddress, clients: Iterable[int], reason: str, now: float) -> Round:
        with self._write() as connection:
            _require_open(connection, address)
            for client in clients:
                answer = _answer(connection, address, client)
                if answer is None:
                    continue
                _record(connection, address, answer, reason, struck=True, now=now)
                connection.execute(
                    update(seats).where(is_seat(address, client)).values(state="rejected", reason=reason)
                )
                member = update(members).where(members.c.run_id == address.run_id, members.c.client == client)
                connection.execute(member.values(strikes=members.c.strikes + 1))
            _give_reason(connection, address, reason)
            return read_round(connection, address)

    def do_anew(self, address: RoundAddress, reason: str, deadline: float | None, now: float) -> Round:
        with self._write() as connection:
            _require_open(connection, address)
            _record_all(connection, address, reason, now)
            connection.execute(
                update(seats)
                .where(has_seat(address), seats.c.state == "updated")
                .values(state="cut", reason=reason)
            )
            connection.execute(
                update(rounds)
                .where(is_open(address))
                .values(failures=rounds.c.failures + 1, deadline=deadline)
            )
            _give_reason(connection, address, reason)
            return read_round(connection, address)

    def ask_again(self, address: RoundAddress, client: int, reason: str, deadline: float | None) -> Round:
        with self._write() as connection:
            _require_open(connection, address)
            connection.execute(
                update(seats)
                .where(is_seat(address, client), seats.c.state == "updated")
                .values(state="selected", reason=reason)
            )
            connection.execute(update(rounds).where(is_open(address)).values(deadline=deadline))
            return read_round(connection, address)

    def undo(self, calibration: RoundAddress, reason: str, last: bool, now: float) -> Run:
        run_id, number = calibration.run_id, calibration.number
        with self._write() as connection:
            _require_open(connection, calibration)
            connection.execute(update(rounds).where(is_open(calibration)).values(state="committed"))
            ready = read_run(connection, run_id).ready
            kept = connection.execute(select(rounds).where(_is_training(run_id, ready))).one()
            before: dict[str, Any] = json.loads(kept.metrics)
            for undone in range(ready + 1, number + 1):
                _throw_out_all(connection, RoundAddress(run_id, undone), reason, now)
                _undo_metrics(connection, RoundAddress(run_id, undone), kept.model, before, reason)
            ended = {"state": "finished", "reason": "", "ended": now} if last else {"reason": reason}
            widths = bytes(before["bit_widths"])
            moved = {"model": kept.model, "bit_widths": widths, "ready": number, **ended}
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(**moved))
            return read_run(connection, run_id)

    def thrown_out(self, run_id: str) -> list[ThrownOut]:
        chosen = select(thrown_out).where(thrown_out.c.run_id == run_id).order_by(thrown_out.c.sequence)
        with self._read() as connection:
            return [
                ThrownOut(
                    number=row.round,
                    phase=row.phase,
                    client=row.client,
                    payload=row.payload,
                    receipt_id=row.receipt_id,
                    reason=row.reason,
                    struck=row.struck,
                )
                for row in connection.execute(chosen)
            ]


def _require_open(connection: Connection, address: RoundAddress) -> None:
    if not lock_round(connection, address):
        raise StoreError(f"{address} is not open")


def _answer(connection: Connection, address: RoundAddress, client: int) -> Row[Any] | None:
    chosen = select(seats).where(is_seat(address, client), seats.c.state == "updated")
    return connection.execute(chosen).one_or_none()


def _record_all(connection: Connection, address: RoundAddress, reason: str, now: float) -> None:
    answered = select(seats).where(has_seat(address), seats.c.state == "updated")
    for answer in connection.execute(answered).all():
        _record(connection, address, answer, reason, struck=False, now=now)


def _throw_out_all(connection: Connection, address: RoundAddress, reason: str, now: float) -> None:
    """No answer of a merged round counts any more; that is held against nobody."""
    _record_all(connection, address, reason, now)
    answered = and_(has_seat(address), seats.c.state == "updated")
    connection.execute(update(seats).where(answered).values(state="rejected", reason=reason))


def _undo_metrics(
    connection: Connection, address: RoundAddress, model: bytes, before: Mapping[str, Any], reason: str
) -> None:
    """The round has the model of an earlier one, and what was measured of that."""
    this = _is_training(address.run_id, address.number)
    known: dict[str, Any] = json.loads(connection.execute(select(rounds.c.metrics).where(this)).scalar_one())
    same = ("bit_widths", "deployed_accuracy", "mean_deployed_accuracy", "measured_by", "metric", "others")
    known |= {name: before[name] for name in same if name in before}
    known |= {"undone": reason, UNDONE_IN_A_ROW: before.get(UNDONE_IN_A_ROW, 0) + 1}
    connection.execute(update(rounds).where(this).values(model=model, metrics=json.dumps(known)))


def _is_training(run_id: str, number: int) -> ColumnElement[bool]:
    return and_(rounds.c.run_id == run_id, rounds.c.round == number, rounds.c.phase == "training")


def _record(
    connection: Connection,
    address: RoundAddress,
    answer: Row[Any],
    reason: str,
    *,
    struck: bool,
    now: float,
) -> None:
    connection.execute(
        insert(thrown_out).values(
            run_id=address.run_id,
            round=address.number,
            phase=address.phase,
            client=answer.client,
            payload=answer.update,
            receipt_id=answer.receipt_id,
            reason=reason,
            struck=struck,
            time=now,
        )
    )


def _give_reason(connection: Connection, address: RoundAddress, reason: str) -> None:
    """For the operator's eyes, until the next round opens."""
    connection.execute(update(runs).where(runs.c.run_id == address.run_id).values(reason=reason))
