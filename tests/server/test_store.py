"""The store, on SQLite and on PostgreSQL: every fact, once, and for good."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from fedmpq.method.state import ClientRecord
from fedmpq.server import database
from fedmpq.server.database import DatabaseError, open_database, sqlite_url
from fedmpq.server.store import (
    CalibrationCommit,
    Joining,
    NameTaken,
    NewSeat,
    Round,
    RoundCommit,
    Run,
    Store,
    StoreError,
    TokenRefused,
    UnknownRun,
    UpdateRefused,
)
from fedmpq.server.tokens import make_token

NOW = 1_700_000_000.0
MOMENT = datetime.fromtimestamp(NOW, timezone.utc)
T = TypeVar("T")


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = Store.open(database_url)
    yield opened
    opened.close()


def add_token(
    store: Store, uses: int | None = 1, days: float | None = None, name: str | None = None
) -> bytes:
    token = make_token(MOMENT, uses=uses, days=days, client_name=name)
    store.add_token(token.record)
    return token.record.digest


def enrol(store: Store, token: bytes, name: str, secret: bytes = b"s" * 32, now: float = NOW) -> str:
    return store.enrol(token, name, 4.0, "1", secret, None, now)


# Tokens and clients


def test_a_token_for_one_use_gives_one_identity(store: Store) -> None:
    token = add_token(store)
    client_id = enrol(store, token, "a")
    known = store.client_by_id(client_id)
    assert known is not None
    assert (known.name, known.budget, known.secret_hash) == ("a", 4.0, b"s" * 32)
    with pytest.raises(TokenRefused, match="used up"):
        enrol(store, token, "b")
    assert [client.name for client in store.list_clients()] == ["a"]


def test_an_enrolment_whose_answer_was_lost_is_repeated_for_nothing(store: Store) -> None:
    token = add_token(store)
    client_id = enrol(store, token, "a")
    assert enrol(store, token, "a", b"t" * 32) == client_id
    known = store.client_by_id(client_id)
    assert known is not None
    assert known.secret_hash == b"t" * 32
    store.mark_seen(client_id, NOW)
    with pytest.raises((NameTaken, TokenRefused)):
        enrol(store, token, "a", b"u" * 32)
    known = store.client_by_id(client_id)
    assert known is not None
    assert known.secret_hash == b"t" * 32, "an identity in use keeps its secret"


def test_a_name_is_taken_until_its_client_is_revoked(store: Store) -> None:
    old = enrol(store, add_token(store), "a")
    other = add_token(store)
    with pytest.raises(NameTaken, match="revoke"):
        enrol(store, other, "a")
    assert store.revoke_client("a", NOW) == old
    assert store.revoke_client("a", NOW) is None
    assert store.client_by_id(old) is None
    new = enrol(store, other, "a")
    assert new != old
    assert [c.client_id for c in store.list_clients()] == [new]
    assert {c.client_id for c in store.list_clients(revoked=True)} == {old, new}
    assert store.unrevoked([old, new]) == {new}


def test_tokens_expire_are_revoked_and_may_be_for_one_name(store: Store) -> None:
    expired = add_token(store, days=1)
    late = (MOMENT + timedelta(days=2)).timestamp()
    with pytest.raises(TokenRefused, match="expired"):
        enrol(store, expired, "a", now=late)
    revoked = add_token(store)
    (record,) = [one for one in store.list_tokens() if one.digest == revoked]
    assert store.revoke_token(record.token_id, NOW)
    assert not store.revoke_token("0" * 12, NOW)
    with pytest.raises(TokenRefused, match="revoked"):
        enrol(store, revoked, "a")
    named = add_token(store, name="b")
    with pytest.raises(TokenRefused, match="for the client"):
        enrol(store, named, "a")
    enrol(store, named, "b")
    with pytest.raises(TokenRefused, match="no such"):
        enrol(store, b"?" * 32, "a")
    assert [c.name for c in store.list_clients()] == ["b"]


def test_many_enrolments_at_once_do_not_overdraw_a_token(store: Store) -> None:
    token = add_token(store, uses=3)

    def attempt(number: int) -> str | None:
        try:
            return enrol(store, token, f"c{number}")
        except TokenRefused:
            return None

    found = [one for one in at_once(attempt, 8) if one is not None]
    assert len(set(found)) == 3
    assert len(store.list_clients()) == 3


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    results: list[T] = []
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        barrier.wait()
        results.append(work(number))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    return results


# Runs


def queue(store: Store, name: str = "run") -> Run:
    return store.queue_run(name, {"rounds": 2}, ["cat", "dog"], b"g" * 32, b"m" * 32, NOW)


def test_runs_wait_for_their_turn(store: Store) -> None:
    first, second = queue(store, "a"), queue(store, "b")
    assert first.class_names == ("cat", "dog")
    assert store.next_run() == first
    assert [run.name for run in store.list_runs()] == ["b", "a"]
    store.abort_run(first.run_id, "enough", NOW)
    assert store.next_run() == second
    assert store.last_ended() == store.run(first.run_id)
    assert store.run_by_name("b") == second
    assert store.run_by_name("c") is None
    with pytest.raises(UnknownRun, match="fedmpq runs"):
        store.run("nonsense")


def test_a_run_is_paused_resumed_and_aborted_but_not_twice(store: Store) -> None:
    run = queue(store)
    assert store.pause_run(run.run_id).state == "paused"
    with pytest.raises(StoreError, match="is paused"):
        store.pause_run(run.run_id)
    assert store.resume_run(run.run_id).state == "waiting"
    opened(store, run)
    store.pause_run(run.run_id)
    assert store.resume_run(run.run_id).state == "running"
    assert store.abort_run(run.run_id, "enough", NOW).reason == "enough"
    for change in (store.pause_run, store.resume_run):
        with pytest.raises(StoreError, match="is aborted"):
            change(run.run_id)


# Rounds


def seat(client: int, payload: bytes = b"p" * 32) -> NewSeat:
    return NewSeat(client, 4.0, 10 + client, (4, 4, 4), payload, 1000)


def opened(store: Store, run: Run, clients: int = 2, number: int = 1) -> Round:
    joining = []
    if number == 1:
        token = add_token(store, uses=None)
        names = [f"{run.name}-{n}" for n in range(clients)]
        joining = [Joining(n, enrol(store, token, name), 4.0, 10) for n, name in enumerate(names)]
    return store.open_round(
        run.run_id,
        number,
        target=clients,
        deadline=None,
        bit_widths=(4, 4, 4),
        joining=joining,
        seats=[seat(n) for n in range(clients)],
        now=NOW,
    )


def commit(
    number: int, last: bool = False, model: bytes = b"n" * 32, keep: int = 1, ready: bool = True
) -> RoundCommit:
    records = [ClientRecord(n, 4.0, 10, (4, 4, 4), (3, 4, 4)) for n in range(2)]
    return RoundCommit(
        round=number,
        last=last,
        ready=ready,
        model=model,
        bit_widths=(4, 4, 3),
        records=records,
        accuracies={0: 0.5},
        bytes_up={0: 7, 1: 8},
        bytes_down={0: 9, 1: 10},
        metrics={"loss": 1.0},
        keep_models=keep,
    )


def test_a_round_from_opening_to_commit(store: Store) -> None:
    run = queue(store)
    current = opened(store, run)
    assert [one.state for one in current.seats] == ["selected", "selected"]
    assert store.current_round(run.run_id) == current
    for client in range(2):
        store.add_update(run.run_id, 1, client, bytes([client]) * 32, 100)
    assert store.blobs_in_use() == {b"g" * 32, b"m" * 32, bytes(32), b"\1" * 32}
    after = store.commit_round(run.run_id, commit(1), NOW)
    assert (after.round, after.model, after.bit_widths) == (1, b"n" * 32, (4, 4, 3))
    assert (after.bytes_up, after.bytes_down, after.state) == (15, 19, "running")
    members = store.members(run.run_id)
    assert [member.returned for member in members] == [(3, 4, 4)] * 2
    assert [member.accuracy for member in members] == [0.5, None]
    assert [member.samples for member in members] == [10, 11], "as it was when dealt to"
    assert store.current_round(run.run_id) is None
    assert store.blobs_in_use() == {b"g" * 32, b"n" * 32}
    opened(store, run, number=2)
    ended = store.commit_round(run.run_id, commit(2, last=True, model=b"o" * 32), NOW + 1)
    assert (ended.state, ended.ended) == ("finished", NOW + 1)
    assert store.next_run() is None


def test_models_are_kept_as_long_as_asked(store: Store) -> None:
    run = queue(store)
    for number in range(1, 5):
        opened(store, run, number=number)
        store.commit_round(run.run_id, commit(number, model=bytes([number]) * 32, keep=3), NOW)
    assert store.blobs_in_use() == {b"g" * 32, b"\2" * 32, b"\3" * 32, b"\4" * 32}


def calibrated(number: int, last: bool = False, model: bytes = b"c" * 32) -> CalibrationCommit:
    return CalibrationCommit(
        round=number,
        last=last,
        model=model,
        accuracies={1: 0.75},
        bytes_up={0: 1},
        bytes_down={0: 2, 1: 3},
        metrics={"loss": 1.0, "calibrated_by": 1},
        keep_models=1,
    )


def open_calibration(store: Store, run: Run, number: int = 1) -> Round:
    return store.open_calibration(run.run_id, number, deadline=NOW + 5, seats=[seat(0), seat(1)], now=NOW)


def test_a_calibration_is_a_round_of_its_own_that_ends_the_run(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    with pytest.raises(StoreError, match="not due"):
        open_calibration(store, run)
    store.commit_round(run.run_id, commit(1, ready=False), NOW)
    assert store.run(run.run_id).ready == 0
    current = open_calibration(store, run)
    assert (current.phase, current.deadline) == ("calibration", NOW + 5)
    assert store.current_round(run.run_id) == current
    receipt = store.add_update(run.run_id, 1, 0, b"s" * 32, 50, "calibration")
    assert store.add_update(run.run_id, 1, 0, b"s" * 32, 50, "calibration") == receipt
    with pytest.raises(UpdateRefused):
        store.add_update(run.run_id, 1, 0, b"t" * 32, 50)
    assert b"s" * 32 in store.blobs_in_use()
    assert store.reject_update(run.run_id, 1, 1, "negative", "calibration")
    assert store.members(run.run_id)[1].strikes == 1
    done = store.commit_calibration(run.run_id, calibrated(1, last=True), NOW)
    assert (done.state, done.ready, done.model) == ("finished", 1, b"c" * 32)
    assert (done.bytes_up, done.bytes_down) == (15 + 1, 19 + 5)
    trained = store.round(run.run_id, 1)
    assert trained is not None
    assert (trained.model, trained.metrics) == (b"c" * 32, {"loss": 1.0, "calibrated_by": 1})
    assert store.members(run.run_id)[1].accuracy == 0.75
    assert store.blobs_in_use() == {b"g" * 32, b"c" * 32}
    with pytest.raises(StoreError, match="not open"):
        store.commit_calibration(run.run_id, calibrated(1), NOW)


def test_what_is_handed_out_is_kept_until_the_next_calibration(store: Store) -> None:
    run = queue(store)
    for number in range(1, 5):
        opened(store, run, number=number)
        model = bytes([number]) * 32
        store.commit_round(run.run_id, commit(number, model=model, ready=False), NOW)
        if number in (1, 4):
            open_calibration(store, run, number)
            store.commit_calibration(run.run_id, calibrated(number, model=bytes([10 + number]) * 32), NOW)
        handed_out = 11 if number < 4 else 14
        newest = handed_out if number in (1, 4) else number
        assert store.run(run.run_id).ready == (1 if number < 4 else 4)
        expected = {b"g" * 32, bytes([handed_out]) * 32, bytes([newest]) * 32}
        assert store.blobs_in_use() == expected, number


def test_an_update_repeated_is_an_update_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    receipts = set(at_once(lambda _: store.add_update(run.run_id, 1, 0, b"u" * 32, 100), 8))
    assert len(receipts) == 1
    with pytest.raises(UpdateRefused):
        store.add_update(run.run_id, 1, 0, b"v" * 32, 100)
    current = store.current_round(run.run_id)
    assert current is not None
    assert [(one.state, one.update) for one in current.seats] == [("updated", b"u" * 32), ("selected", None)]
    store.commit_round(run.run_id, commit(1), NOW)
    assert {store.add_update(run.run_id, 1, 0, b"u" * 32, 100)} == receipts, "after the round, too"


@pytest.mark.parametrize(("number", "client"), [(1, 5), (2, 0), (0, 0)])
def test_an_update_from_elsewhere_is_refused(store: Store, number: int, client: int) -> None:
    run = queue(store)
    before = opened(store, run)
    with pytest.raises(UpdateRefused):
        store.add_update(run.run_id, number, client, b"u" * 32, 100)
    assert store.current_round(run.run_id) == before


def test_a_closed_round_takes_nothing_more(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    store.add_update(run.run_id, 1, 0, b"u" * 32, 100)
    closed = store.close_round(run.run_id, 1, "too late")
    assert [one.state for one in closed.seats] == ["updated", "cut"]
    with pytest.raises(UpdateRefused):
        store.add_update(run.run_id, 1, 1, b"v" * 32, 100)
    assert store.close_round(run.run_id, 1, "again") == closed, "as after a crash"


def test_a_rejected_update_is_a_strike_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    assert store.reject_update(run.run_id, 1, 1, "bad")
    assert not store.reject_update(run.run_id, 1, 1, "bad")
    assert [member.strikes for member in store.members(run.run_id)] == [0, 1]
    with pytest.raises(UpdateRefused):
        store.add_update(run.run_id, 1, 1, b"u" * 32, 100)
    found = store.seat_of(run.run_id, 1, store.members(run.run_id)[1].client_id)
    assert found is not None
    assert (found.state, found.reason) == ("rejected", "bad")


def test_a_reopened_round_has_new_clients_and_may_have_old_ones_again(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    joining = [Joining(2, enrol(store, add_token(store), "late"), 2.0, 7)]

    def reopen(cut: list[int], joining: list[Joining], seats: list[NewSeat]) -> Round:
        return store.reopen_round(
            run.run_id, 1, deadline=NOW + 5, extended=True, cut=cut, joining=joining, seats=seats
        )

    current = reopen([1], joining, [seat(2)])
    assert [one.state for one in current.seats] == ["selected", "cut", "selected"]
    assert (current.extended, current.deadline) == (1, NOW + 5)
    current = reopen([], [], [seat(1)])
    assert [one.state for one in current.seats] == ["selected"] * 3
    assert current.extended == 2


def test_nothing_of_a_commit_is_left_if_the_run_was_aborted(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    store.abort_run(run.run_id, "enough", NOW)
    before = store.members(run.run_id)
    with pytest.raises(StoreError, match="has ended"):
        store.commit_round(run.run_id, commit(1), NOW)
    assert store.run(run.run_id).round == 0
    assert store.members(run.run_id) == before
    stored = store.round(run.run_id, 1)
    assert stored is not None
    assert stored.state == "open"


def test_a_round_opens_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    with pytest.raises(StoreError, match="moved on"):
        store.open_round(
            run.run_id, 5, target=1, deadline=None, bit_widths=(4,), joining=[], seats=[], now=NOW
        )
    store.pause_run(run.run_id)
    with pytest.raises(StoreError):
        opened(store, run, number=1)


# Durability and migrations

_WRITER = """
import sys
from fedmpq.server.store import Store
store = Store.open(sys.argv[1])
for number in range(10_000):
    print(store.add_update(sys.argv[2], 1, number, number.to_bytes(32, "big"), 1), flush=True)
"""


def test_what_was_acknowledged_survives_sigkill(database_url: str) -> None:
    store = Store.open(database_url)
    run = queue(store)
    opened(store, run, clients=300)
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, database_url, run.run_id], stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        receipts = [writer.stdout.readline().strip() for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        receipts += [line.strip() for line in writer.stdout if line.endswith("\n")]
    store.close()
    again = Store.open(database_url)
    current = again.current_round(run.run_id)
    again.close()
    assert current is not None
    kept = [one.receipt_id for one in current.seats if one.state == "updated"]
    assert kept[: len(receipts)] == receipts
    assert len(kept) <= len(receipts) + 1, "one may be stored and not yet acknowledged"


def test_the_migrations_make_the_tables(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), database.metadata) == []
    engine.dispose()


def test_a_database_of_the_first_version_is_taken_over(database_url: str) -> None:
    """With a finished run and one in the middle of a round, as the version before left them."""
    engine = database._make_engine(database_url)
    with database.writing(engine) as connection:
        config = Config()
        config.set_main_option("script_location", "fedmpq.server:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for sequence, name, state, done in ((1, "old", "finished", 3), (2, "now", "running", 0)):
            settings = {"name": name, "rounds": 3, "lasso": 0.01, "moved_statistics": True}
            connection.execute(
                text(
                    "INSERT INTO runs (sequence, run_id, name, config, class_names, state, reason, graph, "
                    "model, round, bytes_up, bytes_down, created) VALUES (:sequence, :name, :name, :config, "
                    "'[]', :state, '', :blob, :blob, :done, 0, 0, 1.0)"
                ),
                {"sequence": sequence, "name": name, "config": json.dumps(settings), "state": state}
                | {"done": done, "blob": b"b"},
            )
        connection.execute(
            text(
                "INSERT INTO rounds (run_id, round, state, target, opened, extended) "
                "VALUES ('now', 1, 'open', 2, 1.0, 0)"
            )
        )
    engine.dispose()
    store = Store.open(database_url)
    assert [run.ready for run in (store.run("old"), store.run("now"))] == [3, 0]
    kept = store.run("old").config
    assert (kept["statistics"], kept["lasso"]) == ("calibrated", None)
    assert "moved_statistics" not in kept
    current = store.current_round("now")
    assert current is not None
    assert (current.round, current.phase) == (1, "training")
    store.close()


def test_the_newest_migration_is_the_one_the_code_names() -> None:
    config = Config()
    config.set_main_option("script_location", "fedmpq.server:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == database.SCHEMA_REVISION


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "fedmpq.db")
    engine = open_database(url)
    with database.writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(DatabaseError, match="9999"):
        open_database(url)


@pytest.mark.parametrize("url", ["nonsense", "oracle9://x/y"])
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(DatabaseError, match="postgresql"):
        open_database(url)
