"""A server that is alone, a leader and front-ends: who leads whom, and what they are told that is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedmpq.cli.main import main
from fedmpq.server.blobs import BlobError, BlobsAway
from fedmpq.server.own_blobs import join_own_blobs, open_own_blobs, require_shared
from fedmpq.server.read_ahead import ReadAhead
from fedmpq.server.roles import require_leader, settle_role
from fedmpq.server.server_settings import ServeError
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import join_store, open_store
from fedmpq.server.wake_ups import WakeUps
from tests.databases import running_postgres

LONG = 600.0


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


@pytest.mark.parametrize("role", ["front", "leader"])
def test_they_need_postgresql(tmp_path: Path, role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "init", "--state", str(tmp_path / "s")]) == 0
    assert main(["server", "--state", str(tmp_path / "s"), "--role", role]) == 2
    assert "name the database with --database postgresql://USER@HOST/NAME" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--exit-when-done"], ["--dashboard", "0"], ["--metrics-port", "0"]])
def test_what_the_leader_does_is_not_asked_of_a_front_end(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["server", "--state", str(tmp_path / "s"), "--role", "front", *words]) == 2
    assert f"{words[0]} is for the leader" in capsys.readouterr().err


def test_a_server_that_is_alone_does_not_lead_front_ends(store: Store) -> None:
    settle_role(store, "all")
    with pytest.raises(StoreFailed, match="start it with --role leader"):
        require_leader(store)
    settle_role(store, "leader")
    require_leader(store)
    store.beat("f", "here:1", LONG)
    with pytest.raises(
        ServeError, match=r"front-ends are at work on this database \(here:1\).*--role leader"
    ):
        settle_role(store, "all")
    store.beat("f", "here:1", -1.0)
    store.lead("me", LONG)
    settle_role(store, "all")
    with pytest.raises(StoreFailed, match="the server that leads, me, serves boards itself"):
        require_leader(store)


def test_payloads_are_where_everybody_reaches_them(tmp_path: Path, store: Store) -> None:
    own, shared = tmp_path / "state" / "blobs", tmp_path / "shared"
    with pytest.raises(StoreFailed, match="no leader has begun"):
        join_own_blobs(store, str(shared), own)
    with pytest.raises(BlobError, match="name a place that the leader and all front-ends share: --blobs s3:"):
        require_shared(str(own), own)
    leader = open_own_blobs(store, str(shared), own, shared=True)
    front = join_own_blobs(store, None, tmp_path / "front" / "blobs")
    name = front.put(b"an update")
    front.delete(name)
    assert leader.read(name) == b"an update", "the leader alone deletes"
    assert store.recorded_blobs() == {name}
    with pytest.raises(BlobsAway, match="or name their place with --blobs"):
        join_own_blobs(store, str(tmp_path / "elsewhere"), own)


def test_what_another_is_writing_is_left_alone(tmp_path: Path, store: Store) -> None:
    open_own_blobs(store, str(tmp_path / "shared"), tmp_path / "own", shared=True)
    half = tmp_path / "shared" / ".half.partial"
    half.write_bytes(b"half")
    open_own_blobs(store, str(tmp_path / "shared"), tmp_path / "own", shared=True)
    assert half.exists()
    open_own_blobs(store, str(tmp_path / "shared"), tmp_path / "own")
    assert not half.exists()


def test_a_front_end_waits_for_tables_of_its_version(tmp_path: Path, database_url: str) -> None:
    with pytest.raises(StoreFailed, match="start a leader of this version"):
        join_store(database_url)
    open_store(database_url).close()
    join_store(database_url).close()


def test_a_leader_reads_answers_ahead_and_deletes_them_later(tmp_path: Path, store: Store) -> None:
    ahead = ReadAhead(open_own_blobs(store, str(tmp_path / "shared"), tmp_path / "own"))
    names = ahead.put_all([b"one", b"two"])
    told: dict[bytes, bytes] = {}
    ahead.expect([*names, bytes(32)], told.__setitem__)
    eventually(lambda: told == dict(zip(names, [b"one", b"two"], strict=True)))
    for name in names:
        (tmp_path / "shared" / name.hex()).unlink()
    assert [ahead.read(name) for name in names] == [b"one", b"two"]
    with pytest.raises(BlobError, match="is missing"):
        ahead.read(bytes(32))
    ahead.put_all([b"one", b"two"])
    ahead.delete_later(names)
    ahead.close()
    assert (list(ahead.names()), store.recorded_blobs()) == ([], set())


def eventually(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_the_other_side_is_woken_up_also_after_the_database_crashed() -> None:
    async def scenario(url: str, crash: Callable[[], None]) -> None:
        leader, front = WakeUps(url, "leader", "fronts"), WakeUps(url, "fronts", "leader")
        try:
            for one, other in ((leader, front), (front, leader)):
                await woken(one, other)
            await asyncio.to_thread(crash)
            await woken(leader, front)
        finally:
            leader.stop()
            front.stop()

    async def woken(one: WakeUps, other: WakeUps) -> None:
        """It listens a moment after it was made, and again a moment after the database is back."""
        seen, end = other.bell.count, time.monotonic() + 60
        while other.bell.count == seen:
            assert time.monotonic() < end
            one.tell()
            await other.wait(seen)

    with running_postgres() as server:
        asyncio.run(scenario(server.url.render_as_string(hide_password=False), server.restart))
