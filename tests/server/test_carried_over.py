"""Places that go over from one asynchronous merge to the next, in either kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.history import KEPT_ROUNDS
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import (
    CarriedOver,
    RoundAddress,
    Run,
    SeatState,
    TrainingCommit,
    TrainingRound,
)
from fedmpq.server.store.sql import open_store
from tests.server.facts import NOW, add_answer, add_token, commit, enrol, member, seat

CLIENTS = 5
FIRST = b"m" * 32
"""The model that the run begins with."""


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


@pytest.fixture
def run(store: Store) -> Run:
    """All clients are at work on version 0."""
    config = {"rounds": 20, "asynchronous": 1, "staleness_limit": 20}
    run = store.queue_run("run", config, ["cat", "dog"], b"g" * 32, FIRST, NOW)
    token = add_token(store, uses=None)
    members = [member(n, enrol(store, token, f"c-{n}")) for n in range(CLIENTS)]
    seats = [replace(seat(n), version=0) for n in range(CLIENTS)]
    facts = {"target": 1, "deadline": None, "bit_widths": (4, 4, 4), "now": NOW}
    store.open_round(run.run_id, 1, members=members, seats=seats, **facts)  # type: ignore[arg-type]
    return run


def merge(number: int, clients: list[int], dropped: dict[int, str] | None = None) -> TrainingCommit:
    plain = commit(number, model=bytes([number]) * 32)
    return replace(plain, carried=CarriedOver(1, frozenset(clients), dropped or {}))


def answer(store: Store, run: Run, number: int, client: int) -> bytes:
    payload = bytes([client + 100]) * 32
    add_answer(store, RoundAddress(run.run_id, number), client, payload, 10)
    return payload


def states(found: TrainingRound) -> dict[int, tuple[SeatState, int | None]]:
    return {seat.client: (seat.state, seat.version) for seat in found.seats}


def current(store: Store, run: Run) -> TrainingRound:
    found = store.current_round(run.run_id)
    assert isinstance(found, TrainingRound)
    return found


def test_those_at_work_go_over_to_the_next_merge(store: Store, run: Run) -> None:
    """In the same transaction; and so do answers that came while the merge was made."""
    for client in (0, 1):
        answer(store, run, 1, client)
    store.decline(RoundAddress(run.run_id, 1), 2, "no room")
    after = store.commit_round(run.run_id, merge(1, [0], {3: "too late"}), NOW + 5)
    assert (after.round, after.model, after.state) == (1, b"\1" * 32, "running")
    done, now = store.round(run.run_id, 1), current(store, run)
    assert states(done) == {0: ("updated", 0), 2: ("declined", 0), 3: ("cut", 0)}
    assert next(one for one in done.seats if one.client == 3).reason == "too late"
    assert states(now) == {1: ("updated", 0), 4: ("selected", 0)}
    assert (now.address.number, now.target, now.opened, now.deadline) == (2, 1, NOW + 5, None)
    assert [now.address.staleness(one) for one in now.seats] == [1, 1]
    assert {now.address.sent(one) for one in now.seats} == {RoundAddress(run.run_id, 1)}


def test_the_models_of_versions_in_flight_are_kept(store: Store, run: Run) -> None:
    answer(store, run, 1, 0)
    store.commit_round(run.run_id, merge(1, [0]), NOW)
    fresh = [replace(seat(0), version=1)]
    facts = {"deadline": None, "extended": False, "cut": (), "reason": "", "members": ()}
    store.reopen_round(RoundAddress(run.run_id, 2), seats=fresh, **facts)  # type: ignore[arg-type]
    assert {one.client: one.sent_model for one in current(store, run).seats} == {0: None} | dict.fromkeys(
        range(1, CLIENTS), FIRST
    )
    late = answer(store, run, 2, 1)
    store.commit_round(run.run_id, merge(2, [1], dict.fromkeys(range(2, CLIENTS), "too late")), NOW)
    assert states(current(store, run)) == {0: ("selected", 1)}
    (seated,) = current(store, run).seats
    assert seated.sent_model == b"\1" * 32
    used = store.blobs_in_use()
    assert b"\1" * 32 in used
    assert not used & {FIRST, late}, "nobody is at work on the first version, and its change is merged"


def test_an_answer_of_an_earlier_version_has_one_receipt(store: Store, run: Run) -> None:
    """The board knows its work by the round it was sent in, however many merges ago, folded or not."""
    ids = [one.client_id for one in store.members(run.run_id)]
    answer(store, run, 1, 0)
    store.commit_round(run.run_id, merge(1, [0]), NOW)
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, 1), 1, b"x" * 32, 10)
    payload = answer(store, run, 2, 1)
    store.commit_round(run.run_id, merge(2, [1]), NOW)
    before = store.seat_of(RoundAddress(run.run_id, 1), ids[1])
    assert before is not None
    assert before.answer is not None
    assert (before.version, before.answer.payload) == (0, payload)
    for number in range(3, 4 + KEPT_ROUNDS):
        store.commit_round(run.run_id, merge(number, []), NOW)
    after = store.seat_of(RoundAddress(run.run_id, 1), ids[1])
    assert after == replace(before, sent_model=None), "what is folded keeps no model"
    waiting = store.seat_of(RoundAddress(run.run_id, 1), ids[4])
    assert waiting is not None
    assert (waiting.state, waiting.version) == ("selected", 0)
    assert store.seat_of(RoundAddress(run.run_id, 2), ids[1]) is None


def test_without_anyone_carried_over_no_merge_is_open(store: Store, run: Run) -> None:
    answer(store, run, 1, 0)
    store.close_round(RoundAddress(run.run_id, 1), "the last merge")
    store.commit_round(run.run_id, commit(1), NOW)
    assert store.current_round(run.run_id) is None
    assert set(states(store.round(run.run_id, 1)).values()) == {("updated", 0), ("cut", 0)}
