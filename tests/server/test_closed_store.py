"""A store that is closed while a thread is in a transaction keeps no connection."""

from __future__ import annotations

from sqlalchemy import Pool, QueuePool, text

from fedmpq.server.database import open_database
from fedmpq.server.store.sql import SqlStore


def connections(pool: Pool) -> int:
    assert isinstance(pool, QueuePool)
    return pool.checkedin() + pool.checkedout()


def test_a_transaction_under_way_ends_its_own_connection(database_url: str) -> None:
    engine = open_database(database_url)
    store, pool = SqlStore(engine), engine.pool
    with store._read() as connection:
        store.close()
        assert connection.execute(text("SELECT 1")).scalar() == 1
    assert connections(pool) == connections(engine.pool) == 0


def test_so_does_one_that_begins_later(database_url: str) -> None:
    engine = open_database(database_url)
    store = SqlStore(engine)
    store.close()
    store.list_tokens()
    assert connections(engine.pool) == 0
