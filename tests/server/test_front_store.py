"""Front-ends in the store: a board is where its newest stream is, and an answer counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from fedmpq.server.connections import Connections, FarConnection
from fedmpq.server.database import open_database
from fedmpq.server.presence import NAMES, PresenceReader
from fedmpq.server.store import transactions
from fedmpq.server.store.answers import _standing
from fedmpq.server.store.errors import Deposed, StoreFailed, UpdateRefused
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Answered, Forwarded, Present, Round, RoundAddress, UploadPart
from fedmpq.server.store.sql import SqlStore, open_store
from tests.server.facts import add_token, at_once, enrol, opened, queue, seat

LONG = 600.0


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


def boards(store: Store, *names: str) -> list[str]:
    token = add_token(store, uses=None)
    return [enrol(store, token, name) for name in names]


def present(client_id: str, **said: object) -> Present:
    return Present(client_id, True, said)


def test_a_front_end_is_there_as_long_as_it_says_so(store: Store) -> None:
    assert store.beat("f", "here:1", LONG)
    assert not store.beat("f", "here:1", LONG)
    store.beat("g", "here:2", -1.0)
    known = {front.front_id: front for front in store.front_ends()}
    assert LONG - 60 < known["f"].left <= LONG
    assert known["g"].left < 0
    assert known["f"].address == "here:1"
    store.remove_front("g")
    assert [front.front_id for front in store.front_ends()] == ["f"]


def test_a_board_is_where_its_newest_stream_is(store: Store) -> None:
    (board,) = boards(store, "a")
    for front in ("f", "g"):
        store.beat(front, front, LONG)
    store.note_presence("f", [present(board, stream=1)], (), ())
    assert store.boards_at("f") == {board}
    store.note_presence("g", [present(board, stream=2)], (), ())
    # What the first one says of its old stream by now, and that it is over, changes nothing.
    store.note_presence("f", (), [present(board, stream=1, ready_for="x")], ())
    store.note_presence("f", (), (), [board])
    assert (store.boards_at("f"), store.boards_at("g")) == (set(), {board})
    assert [one.said for one in store.presence("g", 0)] == [{"stream": 2}]


steps = st.tuples(
    st.sampled_from("fg"),
    st.sampled_from(("come", "change", "go", "vanish")),
    st.integers(0, 2),
    st.booleans(),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=12))
@example([("g", "come", 0, True), ("f", "come", 0, False), ("f", "go", 0, False)])
def test_a_leader_that_looks_now_and_then_knows_who_is_there(
    store: Store, taken: list[tuple[str, str, int, bool]]
) -> None:
    """As a plain dictionary says it."""
    ids = [client.client_id for client in store.list_clients()] or boards(store, "a", "b", "c")
    for front in "fg":
        store.remove_front(front)
    where: dict[str, tuple[str, str]] = {}
    there: set[str] = set()
    connections = Connections(3, kind=FarConnection)
    reader = PresenceReader(store, connections)
    for number, (front, what, which, looks) in enumerate(taken):
        # One that did not say that it is there, for it was cut off, may come back with its boards.
        store.beat(front, front, -1.0 if what == "vanish" else LONG)
        (there.discard if what == "vanish" else there.add)(front)
        if what != "vanish":
            step(store, where, front, what, ids[which], number)
        if looks:
            asyncio.run(reader.look())
    asyncio.run(reader.look())
    found = {each.client.client_id: each.ready_for for each in connections.open()}
    assert found == {board: ready_for for board, (front, ready_for) in where.items() if front in there}


def step(
    store: Store, where: dict[str, tuple[str, str]], front: str, what: str, board: str, number: int
) -> None:
    """Something happens at a front-end, in the store and in `where`."""
    facts = dict.fromkeys(NAMES) | {"answers": True, "stream": number, "ready_for": f"run {number}"}
    said = present(board, **facts)
    if what == "come":
        store.note_presence(front, [said], (), ())
        where[board] = (front, f"run {number}")
    elif where.get(board, ("", ""))[0] == front:
        changed, gone = ([said], ()) if what == "change" else ((), [board])
        store.note_presence(front, (), changed, gone)
        if what == "change":
            where[board] = (front, f"run {number}")
        else:
            del where[board]


def test_what_a_board_said_elsewhere_is_taken_once(store: Store) -> None:
    here, there = boards(store, "a", "b")
    store.beat("f", "f", LONG)
    store.note_presence("f", [present(here)], (), ())
    said = [Forwarded(here, "run"), Forwarded(there, "run"), Forwarded(here, None, "no data")]
    for one in said:
        store.forward(one)
    assert store.take_forwarded("f") == [said[0], said[2]]
    assert store.take_forwarded("f") == []


def test_pieces_of_an_upload_count_up_to_the_first_gap(store: Store) -> None:
    board, other = boards(store, "a", "b")
    name, piece = b"n" * 32, b"p" * 32
    parts = [UploadPart(0, 4, piece), UploadPart(4, 2, piece), UploadPart(8, 1, piece)]
    for part in [*parts, UploadPart(4, 2, b"q" * 32)]:
        store.add_upload_part(board, name, part)
    store.add_upload_part(other, name, parts[0])
    assert store.upload_parts(board, name) == parts[:2]
    assert piece in store.blobs_in_use()
    store.forget_upload(board, name, beyond=5)
    assert store.upload_parts(board, name) == parts[:1]
    store.forget_other_uploads(board, b"m" * 32)
    assert store.upload_parts(board, name) == []
    store.keep_uploads_of([board])
    assert store.upload_parts(other, name) == []
    assert piece not in store.blobs_in_use()


def test_an_answer_to_what_was_sent_before_is_refused(store: Store) -> None:
    """The place was given up and dealt anew while a front-end checked what had come for the first deal."""
    run_id = opened_run(store)
    address = RoundAddress(run_id, 1)
    (stale,) = store.add_answers(address, [Answered(0, b"u" * 32, 5, b"x" * 32)])
    (good,) = store.add_answers(address, [Answered(0, b"v" * 32, 5, seat(0).payload)])
    assert isinstance(stale, UpdateRefused)
    assert "has sent this client something else" in str(stale)
    assert isinstance(good, str)


def opened_run(store: Store) -> str:
    """A run whose first round is open, with two clients."""
    return opened(store, queue(store)).address.run_id


def test_front_ends_that_bring_the_same_answer_get_the_same_receipt(database_url: str) -> None:
    first, *others = [open_store(database_url) for _ in range(4)]
    run_id = opened_run(first)
    answers = [Answered(client, b"u" * 32, 5, seat(client).payload) for client in (1, 0)]
    given = at_once(lambda number: others[number].add_answers(RoundAddress(run_id, 1), answers), 3)
    assert len({tuple(map(str, receipts)) for receipts in given}) == 1
    assert all(isinstance(receipt, str) for receipts in given for receipt in receipts)
    for store in (first, *others):
        store.close()


def test_an_answer_and_the_round_s_end_at_once_agree(database_url: str) -> None:
    """Whoever is first: an answer that has its receipt is among those that the leader merges."""
    leader, front = open_store(database_url), open_store(database_url)
    run_id = opened_run(leader)
    leader.lead("leader", LONG)
    address = RoundAddress(run_id, 1)
    answers = [Answered(client, b"u" * 32, 5) for client in (0, 1)]
    ended: list[Round] = []
    given: list[str | UpdateRefused] = []

    def work(number: int) -> None:
        if number:
            ended.append(leader.close_round(address, "late"))
        else:
            given.extend(front.add_answers(address, answers))

    at_once(work, 2)
    (closed,), receipts = ended, given
    taken = {seat.client for seat in closed.seats if seat.state == "updated"}
    assert taken == {one.client for one, got in zip(answers, receipts, strict=True) if isinstance(got, str)}
    for store in (leader, front):
        store.close()


def test_a_front_end_that_stands_still_does_not_hold_the_leader(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("one process has the database")
    patience = transactions._PATIENCE.replace(f"'{transactions.PAUSED_SECONDS}s'", "'1s'")
    monkeypatch.setattr(transactions, "_PATIENCE", patience)
    leader, front = open_store(database_url), SqlStore(open_database(database_url))
    run_id = opened_run(leader)
    leader.lead("leader", LONG)
    address = RoundAddress(run_id, 1)

    def stand_still() -> None:
        with front._write() as connection:
            _standing(connection, address, [0])
            closed = leader.close_round(address, "late")
            assert [seat.state for seat in closed.seats] == ["cut", "cut"]
            connection.execute(text("SELECT 1"))

    with pytest.raises(StoreFailed, match="idle"):
        stand_still()
    for store in (leader, front):
        store.close()


def test_a_stale_leader_is_refused_and_a_front_end_is_not(database_url: str) -> None:
    leader, front, next_leader = (open_store(database_url) for _ in range(3))
    run_id = opened_run(leader)
    leader.lead("leader", -1.0)
    assert next_leader.lead("next", LONG) == 2
    with pytest.raises(Deposed):
        leader.close_round(RoundAddress(run_id, 1), "late")
    with pytest.raises(Deposed):
        leader.keep_uploads_of(())
    (receipt,) = front.add_answers(RoundAddress(run_id, 1), [Answered(0, b"u" * 32, 5, seat(0).payload)])
    assert isinstance(receipt, str)
    for store in (leader, front, next_leader):
        store.close()
