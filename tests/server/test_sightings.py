"""When boards were last connected: noted in few transactions, and known after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from fedmpq.model.metrics import metric_named
from fedmpq.server.client_table import client_table
from fedmpq.server.connections import Connections
from fedmpq.server.sightings import FRESH_SECONDS, SightingKeeper
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Client, Sighting
from fedmpq.server.store.sql import open_store
from fedmpq.server.stored_status import stored_status
from tests.server.facts import NOW, add_token, enrol


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


class Scene:
    """Two boards, and a clock that stands still until it is told to go on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seconds = 0.0
        self.connections = Connections(10, lambda: self.seconds)
        self.keeper = SightingKeeper(store, self.connections, lambda: NOW + self.seconds)
        self.a, self.b = (self._client(name) for name in ("a", "b"))

    def _client(self, name: str) -> Client:
        client = self.store.client_by_id(enrol(self.store, add_token(self.store), name))
        assert client is not None
        return client

    def noted(self) -> list[Sighting]:
        """What is written now, the rest being known."""
        written: list[Sighting] = []
        note = self.store.note_sightings
        self.store.note_sightings = lambda found: written.extend(found) or note(written)  # type: ignore[method-assign,func-returns-value]
        try:
            asyncio.run(self.keeper.note())
        finally:
            self.store.note_sightings = note  # type: ignore[method-assign]
        return written


def test_only_what_is_new_is_written(store: Store) -> None:
    scene = Scene(store)
    assert scene.noted() == []
    connection = scene.connections.connect(scene.a)
    scene.connections.connect(scene.b)
    scene.connections.free_bytes[scene.b.client_id] = 5 << 40
    scene.seconds = 10.0
    assert {one.client_id: one for one in scene.noted()} == {
        scene.a.client_id: Sighting(scene.a.client_id, NOW + 10, None, None),
        scene.b.client_id: Sighting(scene.b.client_id, NOW + 10, None, 5 << 40),
    }
    scene.seconds += FRESH_SECONDS
    assert scene.noted() == []
    scene.connections.disconnect(connection)
    scene.connections.certificate_ends[scene.b.client_id] = NOW + 1e6
    left = NOW + scene.seconds
    scene.seconds += 50.0
    assert {one.client_id: (one.last_seen, one.certificate_ends) for one in scene.noted()} == {
        scene.a.client_id: (left, None),
        scene.b.client_id: (left + 50, NOW + 1e6),
    }
    scene.seconds += FRESH_SECONDS + 1
    assert [one.client_id for one in scene.noted()] == [scene.b.client_id]


def test_a_restart_does_not_forget(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(store)
    scene.connections.connect(scene.a)
    scene.connections.certificate_ends[scene.a.client_id] = NOW + 1e6
    scene.noted()
    a, b = stored_status(store).clients
    assert (a.last_seen.seconds, a.certificate_ends.seconds) == (int(NOW), int(NOW + 1e6))
    assert not a.HasField("free_bytes")
    assert not a.connected
    assert not b.HasField("last_seen")
    monkeypatch.setattr("fedmpq.server.client_table.time.time", lambda: NOW + 7200)
    screen = Console(file=StringIO(), width=80)
    screen.print(client_table(stored_status(store), 80, metric_named("accuracy")))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "away 2 h" in lines[1]
    assert "away  " in lines[2]


def test_what_a_failing_database_missed_is_written_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(store)
    scene.connections.connect(scene.a)

    def fail(found: object) -> None:
        raise StoreFailed("the database fails")

    with monkeypatch.context() as broken:
        broken.setattr(store, "note_sightings", fail)
        asyncio.run(scene.keeper.note())
    assert store.sightings() == {}
    assert [one.client_id for one in scene.noted()] == [scene.a.client_id]
    assert store.sightings().keys() == {scene.a.client_id}
