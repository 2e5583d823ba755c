"""Seats of rounds long past take little room and say what they said, in either kind of database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from sqlalchemy import func, select

from fedmpq.server.database import seats as seats_table
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.history import KEPT_ROUNDS
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Round, RoundAddress, Run
from fedmpq.server.store.sql import SqlStore, open_store
from tests.server.facts import NOW, add_answer, calibrated, commit, open_calibration, opened, queue

ROUNDS = 3 * KEPT_ROUNDS


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = open_store(database_url)
    yield store
    store.close()


def payload_of(address: RoundAddress, client: int) -> bytes:
    return hashlib.sha256(f"{address.number} {address.phase} {client}".encode()).digest()


def worked_through(store: Store, run: Run, number: int, calibrates: bool = True) -> list[Round]:
    """A round and its calibration, with an answer each and somebody rejected or cut; as they were merged."""
    training, calibration = RoundAddress(run.run_id, number), RoundAddress(run.run_id, number, "calibration")
    opened(store, run, number=number)
    add_answer(store, training, 0, payload_of(training, 0), 100 + number)
    store.close_round(training, "the deadline passed")
    store.commit_round(run.run_id, commit(number, ready=False), NOW)
    if not calibrates:
        return [store.round(run.run_id, number)]
    open_calibration(store, run, number)
    add_answer(store, calibration, 1, payload_of(calibration, 1), 50)
    store.reject_answer(calibration, 0, f"a variance of -{number}")
    store.commit_calibration(run.run_id, calibrated(number), NOW)
    measured = store.calibration(run.run_id, number)
    assert measured is not None
    return [store.round(run.run_id, number), measured]


def rows(store: Store) -> int:
    assert isinstance(store, SqlStore)
    with store._read() as connection:
        return connection.execute(select(func.count()).select_from(seats_table)).scalar_one()


def test_old_seats_are_read_as_they_were(store: Store) -> None:
    run = queue(store)
    before = [worked_through(store, run, number) for number in range(1, ROUNDS + 1)]
    assert rows(store) == 4 * KEPT_ROUNDS, "two seats each in training and calibration"
    first, later = before[0][0], store.round(run.run_id, 1)
    assert later.seats == first.seats
    for number, (trained, measured) in enumerate(before, start=1):
        assert store.round(run.run_id, number).seats == trained.seats
        again = store.calibration(run.run_id, number)
        assert again is not None
        assert (again.seats, again.state, again.opened) == (measured.seats, measured.state, measured.opened)


def test_a_receipt_of_an_old_round_is_given_again(store: Store) -> None:
    run = queue(store)
    (trained, _), *_ = [worked_through(store, run, number) for number in range(1, ROUNDS + 1)]
    ids = [member.client_id for member in store.members(run.run_id)]
    seat = store.seat_of(trained.address, ids[0])
    assert seat is not None
    assert seat.answer is not None
    assert seat == trained.seats[0]
    sent = payload_of(trained.address, 0), 101
    assert add_answer(store, trained.address, 0, *sent) == seat.answer.receipt_id
    with pytest.raises(UpdateRefused):
        add_answer(store, trained.address, 1, *sent)
    assert store.seat_of(trained.address, "f" * 32) is None


def test_rounds_that_may_be_undone_keep_their_seats(store: Store) -> None:
    """A round without a calibration is ready with the next one's."""
    run = queue(store)
    worked_through(store, run, 1)
    for number in range(2, ROUNDS + 1):
        worked_through(store, run, number, calibrates=False)
    assert rows(store) == 2 * (ROUNDS - 1)


def test_the_next_run_folds_what_an_earlier_one_left(store: Store) -> None:
    first, second = queue(store, "first"), queue(store, "second")
    worked_through(store, first, 1)
    store.abort_run(first.run_id, "enough", NOW)
    kept = store.round(first.run_id, 1)
    worked_through(store, second, 1)
    assert rows(store) == 4
    assert store.round(first.run_id, 1).seats == kept.seats
