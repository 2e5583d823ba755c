"""Seats of rounds that are long merged: folded into one value on the round's row, and read from there.

A folded value is zlib-compressed JSON: "dealt" lists what was dealt, once for all who were dealt the same, as
[bit-widths, payload, its bytes]; "seats" lists [client, place in "dealt", state, reason, answer], the answer
being [payload, its bytes, receipt] or null, and after that the version of the model that it was sent, where
merges are asynchronous. Hashes and bit-widths are hexadecimal.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, and_, delete, or_, select, update

from fedmpq.server.database import rounds, runs, seats
from fedmpq.server.store.records import Answer, Seat
from fedmpq.server.store.rows import seat_of

KEPT_ROUNDS = 3
"""Seats of so many of the last merged rounds stay rows of their own."""
FOLDS_AT_ONCE = 64
"""A database of an earlier version is folded over several commits."""


def fold_old_seats(connection: Connection, run_id: str, merged: int) -> None:
    """Of this run, at work in round `merged`, and of others. What is not ready may be undone: it stays."""
    same_round = and_(
        seats.c.run_id == rounds.c.run_id, seats.c.round == rounds.c.round, seats.c.phase == rounds.c.phase
    )
    chosen = (
        select(rounds.c.run_id, rounds.c.round, rounds.c.phase)
        .join(seats, same_round)
        .join(runs, runs.c.run_id == rounds.c.run_id)
        .where(
            rounds.c.state == "committed",
            rounds.c.round <= runs.c.ready,
            or_(rounds.c.run_id != run_id, rounds.c.round <= merged - KEPT_ROUNDS),
        )
        .distinct()
        .limit(FOLDS_AT_ONCE)
    )
    for row in connection.execute(chosen).all():
        _fold(connection, row.run_id, row.round, row.phase)


def _fold(connection: Connection, run_id: str, number: int, phase: str) -> None:
    these = and_(seats.c.run_id == run_id, seats.c.round == number, seats.c.phase == phase)
    stored = connection.execute(select(seats).where(these).order_by(seats.c.client)).all()
    this = and_(rounds.c.run_id == run_id, rounds.c.round == number, rounds.c.phase == phase)
    folded = fold([seat_of(row) for row in stored])
    connection.execute(update(rounds).where(this).values(folded_seats=folded))
    connection.execute(delete(seats).where(these))


def fold(stored: Sequence[Seat]) -> bytes:
    dealt: dict[tuple[str, str, int], int] = {}
    folded: list[list[Any]] = []
    for seat in stored:
        what = bytes(seat.bit_widths).hex(), seat.payload.hex(), seat.payload_bytes
        answer = seat.answer
        given = None if answer is None else [answer.payload.hex(), answer.payload_bytes, answer.receipt_id]
        version = [] if seat.version is None else [seat.version]
        place = dealt.setdefault(what, len(dealt))
        folded.append([seat.client, place, seat.state, seat.reason, given, *version])
    text = json.dumps({"dealt": list(dealt), "seats": folded}, separators=(",", ":"))
    return zlib.compress(text.encode(), 9)


def unfold(folded: bytes) -> tuple[Seat, ...]:
    """In the order of client numbers."""
    known = json.loads(zlib.decompress(folded))
    dealt = [(tuple(bytes.fromhex(w)), bytes.fromhex(payload), size) for w, payload, size in known["dealt"]]
    stored = []
    for client, place, state, reason, given, *version in known["seats"]:
        widths, payload, size = dealt[place]
        seat = Seat(client, widths, payload, size, state, reason, _answer(given))
        stored.append(replace(seat, version=version[0]) if version else seat)
    return tuple(stored)


def _answer(given: Sequence[Any] | None) -> Answer | None:
    if given is None:
        return None
    payload, size, receipt_id = given
    return Answer(bytes.fromhex(payload), size, receipt_id)
