"""One server leads at a time, and a write of one that no longer does is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from fedmpq.server.database import make_engine
from fedmpq.server.leading import Lease, holder_of
from fedmpq.server.store import transactions
from fedmpq.server.store.errors import Deposed, StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import SqlStore, open_store
from tests.server.facts import add_token

LONG, SHORT = 600.0, 0.3


@pytest.fixture
def stores(database_url: str) -> Iterator[tuple[Store, Store]]:
    """Those of two servers on one database."""
    both = open_store(database_url), open_store(database_url)
    yield both
    for store in both:
        store.close()


def test_one_leads_and_the_other_does_not(stores: tuple[Store, Store]) -> None:
    first, second = stores
    assert first.leader() is None
    assert first.lead("a", LONG) == 1
    assert second.lead("b", LONG) is None
    leader = second.leader()
    assert leader is not None
    assert (leader.holder, leader.epoch) == ("a", 1)
    assert LONG - 60 < leader.left <= LONG
    first.renew(2 * LONG)
    add_token(first)
    assert len(second.list_tokens()) == 1


def test_the_same_holder_begins_anew_at_once(stores: tuple[Store, Store]) -> None:
    first, second = stores
    assert first.lead("a", LONG) == 1
    assert second.lead("a", LONG) == 2
    with pytest.raises(Deposed, match="another server leads since this one did, in epoch 1"):
        add_token(first)


def test_who_stepped_down_is_followed_at_once(stores: tuple[Store, Store]) -> None:
    first, second = stores
    first.lead("a", LONG)
    first.step_down()
    assert second.lead("b", LONG) == 2
    # It does not lead and does not claim to, as the commands beside a server.
    add_token(first)


def test_a_deposed_leader_writes_nothing(stores: tuple[Store, Store]) -> None:
    first, second = stores
    first.lead("a", SHORT)
    time.sleep(2 * SHORT)
    # Nobody has taken over: it still leads.
    add_token(first)
    assert second.lead("b", LONG) == 2
    with pytest.raises(Deposed):
        add_token(first)
    with pytest.raises(Deposed):
        first.renew(LONG)
    with pytest.raises(Deposed):
        first.remember(blobs="elsewhere")
    assert len(second.list_tokens()) == 1
    assert second.fact("blobs") is None
    add_token(second)


def test_who_stands_by_takes_over_when_the_lease_is_over(stores: tuple[Store, Store]) -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        first, second = Lease(stores[0], "a", SHORT), Lease(stores[1], "b", SHORT)
        deposed = asyncio.Event()
        assert await first.take(never)
        first.keep(deposed.set)
        waiting = asyncio.create_task(second.take(never))
        await asyncio.sleep(4 * SHORT)
        assert not waiting.done(), "the lease is renewed"
        first._renewing.cancel()  # type: ignore[union-attr]
        assert await asyncio.wait_for(waiting, 60)
        first.keep(deposed.set)
        await asyncio.wait_for(deposed.wait(), 60)
        assert first.deposed
        await first.end()
        leader = stores[0].leader()
        assert leader is not None
        assert leader.holder == "b"
        await second.end()

    asyncio.run(scenario())


def paused_after(engine: Engine, words: str, meanwhile: Callable[[], object]) -> None:
    """`meanwhile` runs while a transaction of `engine` stands still behind its statement with these words, as
    if its process had been stopped there."""

    @event.listens_for(engine, "after_cursor_execute")
    def pause(*executed: Any) -> None:
        if words in executed[2]:
            meanwhile()


@pytest.mark.parametrize("last_word", [lambda store: store.renew(LONG), SqlStore.step_down])
def test_a_leader_paused_with_the_lease_locked_is_followed(
    database_url: str, last_word: Callable[[SqlStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("one process has the database")
    second = open_store(database_url)
    patience = transactions._PATIENCE.replace(f"'{transactions.PAUSED_SECONDS}s'", "'1s'")
    monkeypatch.setattr(transactions, "_PATIENCE", patience)
    engine = make_engine(database_url)
    first = SqlStore(engine)
    first.lead("a", -1.0)
    epochs: list[int | None] = []
    paused_after(engine, "UPDATE leadership", lambda: epochs.append(second.lead("b", LONG)))
    with pytest.raises(StoreFailed):
        last_word(first)
    assert epochs == [2]
    for store in (first, second):
        store.close()


def test_a_server_that_is_told_to_stop_stands_by_no_longer(stores: tuple[Store, Store]) -> None:
    async def scenario() -> None:
        stores[0].lead("a", LONG)
        stopped = asyncio.Event()
        waiting = asyncio.create_task(Lease(stores[1], "b", LONG).take(stopped))
        await asyncio.sleep(0.1)
        stopped.set()
        assert not await asyncio.wait_for(waiting, 60)

    asyncio.run(scenario())


def test_servers_are_told_apart_by_machine_and_folder(tmp_path: Path) -> None:
    assert holder_of(tmp_path / "a") != holder_of(tmp_path / "b")
    assert holder_of(tmp_path / "b" / ".." / "a") == holder_of(tmp_path / "a")
