"""The database underneath the store: what a power cut leaves, older and newer versions, URLs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from fedmpq.server import database
from fedmpq.server.database import DatabaseError, open_database, sqlite_url
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.records import RoundAddress
from fedmpq.server.store.sql import open_store
from tests.server.facts import opened, queue

_WRITER = """
import sys
from fedmpq.server.store.records import Answered, RoundAddress
from fedmpq.server.store.sql import open_store
store = open_store(sys.argv[1])
address = RoundAddress(sys.argv[2], 1)
for number in range(10_000):
    print(*store.add_answers(address, [Answered(number, number.to_bytes(32, "big"), 1)]), flush=True)
"""


@pytest.mark.slow
def test_what_was_acknowledged_survives_sigkill(database_url: str) -> None:
    store = open_store(database_url)
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
    again = open_store(database_url)
    current = again.current_round(run.run_id)
    again.close()
    assert current is not None
    kept = [answer.receipt_id for _, answer in current.answers()]
    assert kept[: len(receipts)] == receipts
    assert len(kept) <= len(receipts) + 1, "one may be stored and not yet acknowledged"


def test_a_database_that_fails_is_told_in_the_store_s_words(database_url: str) -> None:
    store = open_store(database_url)
    engine = open_database(database_url)
    with database.writing(engine) as connection:
        connection.execute(text("DROP TABLE seats"))
    engine.dispose()
    with pytest.raises(StoreFailed, match="seats"):
        store.blobs_in_use()
    store.close()


def test_the_migrations_make_the_tables(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), database.metadata) == []
    engine.dispose()


def test_a_database_of_the_first_version_is_taken_over(database_url: str) -> None:
    """With a finished run and one in the middle of a round, as the version before left them."""
    engine = database.make_engine(database_url)
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
    store = open_store(database_url)
    assert [run.ready for run in (store.run("old"), store.run("now"))] == [3, 0]
    kept = store.run("old").config
    assert (kept["statistics"], kept["lasso"]) == ("calibrated", None)
    assert "moved_statistics" not in kept
    current = store.current_round("now")
    assert current is not None
    assert current.address == RoundAddress("now", 1)
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
