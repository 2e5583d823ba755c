"""Answers that come into an open round, in SQL: those that come together are one transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, select, update

from fedmpq.server.database import rounds, runs, seats, thrown_out
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import Answered, RoundAddress
from fedmpq.server.store.rounds import find_seat, has_seat, is_open
from fedmpq.server.store.transactions import Transactions

_TAKE = (
    update(seats)
    .where(
        seats.c.run_id == bindparam("of_run"),
        seats.c.round == bindparam("of_round"),
        seats.c.phase == bindparam("of_phase"),
        seats.c.client == bindparam("of_client"),
    )
    .values(
        state="updated",
        update=bindparam("new_update"),
        update_bytes=bindparam("new_bytes"),
        receipt_id=bindparam("new_receipt"),
    )
)
Receipts = dict[tuple[int, bytes], str]
"""By client and payload."""


class SqlAnswers(Transactions):
    """`Answers` in a database."""

    def add_answers(self, address: RoundAddress, answers: Sequence[Answered]) -> list[str | UpdateRefused]:
        with self._write() as connection:
            waiting, known = _standing(connection, address, [answer.client for answer in answers])
            taken: dict[int, Answered] = {}
            for answer in answers:
                # Of two answers of one client in one batch the first counts, as it would one by one.
                if answer.client in waiting and answer.sent in (None, waiting[answer.client]):
                    taken.setdefault(answer.client, answer)
            receipts = {
                client: known.get((client, answer.payload)) or uuid.uuid4().hex
                for client, answer in taken.items()
            }
            _take(connection, address, taken, receipts)
            if again := [receipt for receipt in receipts.values() if receipt in known.values()]:
                connection.execute(delete(thrown_out).where(thrown_out.c.receipt_id.in_(again)))
            return [_receipt(connection, address, answer, taken, receipts) for answer in answers]


def _standing(
    connection: Connection, address: RoundAddress, clients: Sequence[int]
) -> tuple[dict[int, bytes], Receipts]:
    """Which of the clients may answer, with what they were sent, and receipts of answers they gave before.

    One update has one receipt, which counts again if the client is asked for it again or the round is done
    anew.
    """
    # The rows stay as they are until the transaction is over; SQLite has one writer anyway. Several
    # front-ends may bring answers at a time: they share the round, and take the seats for themselves.
    alive = (
        select(rounds.c.round)
        .join(runs, runs.c.run_id == rounds.c.run_id)
        .where(is_open(address), runs.c.state != "aborted")
        .with_for_update(read=True)
    )
    if connection.execute(alive).one_or_none() is None:
        return {}, {}
    seated = (
        select(seats.c.client, seats.c.state, seats.c.payload, seats.c.update, seats.c.receipt_id)
        .where(has_seat(address), seats.c.client.in_(clients))
        .order_by(seats.c.client)
        .with_for_update()
    )
    gone = select(thrown_out.c.client, thrown_out.c.payload, thrown_out.c.receipt_id).where(
        thrown_out.c.run_id == address.run_id,
        thrown_out.c.round == address.number,
        thrown_out.c.phase == address.phase,
        thrown_out.c.client.in_(clients),
    )
    waiting: dict[int, bytes] = {}
    known: Receipts = {(row.client, row.payload): row.receipt_id for row in connection.execute(gone)}
    for row in connection.execute(seated):
        if row.state == "selected":
            waiting[row.client] = row.payload
        if row.update is not None:
            known[row.client, row.update] = row.receipt_id
    return waiting, known


def _take(
    connection: Connection, address: RoundAddress, taken: dict[int, Answered], receipts: dict[int, str]
) -> None:
    if not taken:
        return
    this = {"of_run": address.run_id, "of_round": address.number, "of_phase": address.phase}
    rows = [
        this
        | {
            "of_client": client,
            "new_update": answer.payload,
            "new_bytes": answer.payload_bytes,
            "new_receipt": receipts[client],
        }
        for client, answer in taken.items()
    ]
    connection.execute(_TAKE, rows)


def _receipt(
    connection: Connection,
    address: RoundAddress,
    answer: Answered,
    taken: dict[int, Answered],
    receipts: dict[int, str],
) -> str | UpdateRefused:
    if taken.get(answer.client) == answer:
        return receipts[answer.client]
    seat = find_seat(connection, address, answer.client)
    given = seat.answer if seat is not None and seat.state == "updated" else None
    if given is not None and given.payload == answer.payload:
        return given.receipt_id
    if seat is not None and seat.state == "selected":
        return UpdateRefused(f"round {address.number} has sent this client something else since")
    state = "has no place for this client" if seat is None else f"has this client {seat.state}"
    return UpdateRefused(f"round {address.number} takes no more of this client: it is over or {state}")
