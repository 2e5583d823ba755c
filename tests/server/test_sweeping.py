"""Blobs that are swept while the next round begins, and answers that come meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fedmpq.server.blobs import FolderBlobs, Outgoing
from fedmpq.server.connections import Connections
from fedmpq.server.own_blobs import OwnBlobs, open_own_blobs
from fedmpq.server.resources import Resources
from fedmpq.server.store.sql import open_store


class SlowBlobs(FolderBlobs):
    """Deletes when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.may_delete = threading.Event(), threading.Event()

    def delete(self, name: bytes) -> None:
        self.asked.set()
        assert self.may_delete.wait(60)
        super().delete(name)


def test_an_answer_waits_until_blobs_are_swept(tmp_path: Path, database_url: str) -> None:
    """Its fact comes after its blob: a sweep that went on meanwhile would take it for one of no use."""
    store = open_store(database_url)
    owner = open_own_blobs(store, str(tmp_path / "blobs"), tmp_path / "own").owner_id
    slow = SlowBlobs(tmp_path / "blobs")
    blobs = OwnBlobs(slow, store, owner, str(tmp_path / "blobs"))
    resources = Resources(store, blobs, Outgoing(tmp_path / "outgoing"), Connections(10))
    old = resources.put_answers([b"merged"])[0]
    resources.sweep(wait=False)
    assert slow.asked.wait(60)
    put: list[bytes] = []
    putting = threading.Thread(target=lambda: put.extend(resources.put_answers([b"new", b"merged"])))
    putting.start()
    putting.join(0.2)
    assert putting.is_alive()
    slow.may_delete.set()
    putting.join(60)
    assert set(blobs.names()) == set(put) == store.recorded_blobs()
    assert old in put
    resources.workers.shutdown()
    store.close()


def test_a_disk_that_does_not_let_go_holds_no_round(
    tmp_path: Path, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(database_url)
    blobs = open_own_blobs(store, str(tmp_path / "blobs"), tmp_path / "own")
    resources = Resources(store, blobs, Outgoing(tmp_path / "outgoing"), Connections(10))
    resources.put_answers([b"merged"])

    def broken(name: bytes) -> None:
        raise OSError(5, "Input/output error")

    blobs.delete = broken  # type: ignore[method-assign]
    resources.sweep(wait=False)
    assert resources.put_answers([b"new"])
    assert "payloads that are needed no more stay for now" in caplog.text
    del blobs.delete
    resources.sweep()
    assert list(blobs.names()) == []
    resources.workers.shutdown()
    store.close()
