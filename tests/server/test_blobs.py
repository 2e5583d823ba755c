"""Payloads on disk: whole or absent, named by their bytes, and gone when nothing refers to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmpq.exchange.wire import digest
from fedmpq.server.blobs import BlobError, Blobs, FolderBlobs, Outgoing, Uploads, open_blobs
from tests.s3 import S3, running_s3


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        return open_blobs(request.getfixturevalue("s3").url(tmp_path.name))
    place = {
        "folder": str(tmp_path / "blobs"),
        "file": f"file://{tmp_path / 'blobs'}",
        "memory": f"memory://{tmp_path.name}",
    }
    return open_blobs(place[request.param])


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with running_s3(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def test_the_same_bytes_are_one_blob(blobs: Blobs) -> None:
    assert list(blobs.names()) == []
    name = blobs.put(b"payload")
    assert name == digest(b"payload")
    assert blobs.put(b"payload") == name
    assert blobs.read(name) == b"payload"
    assert list(blobs.names()) == [name]


def test_the_owner_is_no_blob(blobs: Blobs) -> None:
    assert blobs.owner() is None
    blobs.set_owner("me")
    assert blobs.owner() == "me"
    assert list(blobs.names()) == []


def test_a_place_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    away = open_blobs(str(tmp_path / "away"), make=False)
    assert (away.owner(), list(away.names())) == (None, [])
    assert not (tmp_path / "away").exists()


def test_good_bytes_take_the_place_of_damaged_ones(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"payload")
    blobs.path(name).write_bytes(b"")
    assert blobs.put(b"payload") == name
    assert blobs.read(name) == b"payload"


def test_what_is_deleted_is_missing(blobs: Blobs) -> None:
    kept, gone = blobs.put(b"kept"), blobs.put(b"gone")
    blobs.delete(gone)
    assert list(blobs.names()) == [kept]
    with pytest.raises(BlobError, match="missing"):
        blobs.read(gone)
    blobs.delete(gone)


def test_a_damaged_blob_is_not_believed(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"payload")
    blobs.path(name).write_bytes(b"Payload")
    with pytest.raises(BlobError, match="damaged"):
        blobs.read(name)


def test_half_a_blob_of_a_crash_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".abc.partial").write_bytes(b"pay")
    (tmp_path / "README").write_text("not a blob")
    blobs = FolderBlobs(tmp_path)
    assert list(blobs.names()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["README"]


def test_a_blob_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that makes it survive a power cut: file, name, folder."""
    blobs, done = FolderBlobs(tmp_path), []
    fsync, replace = os.fsync, os.replace

    def flush(descriptor: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file")
        fsync(descriptor)

    def rename(self: Path, target: Path) -> None:
        done.append("name")
        replace(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    blobs.put(b"payload")
    assert done == ["file", "name", "folder"]


def test_an_unknown_place_is_named() -> None:
    with pytest.raises(BlobError, match="nonsense://"):
        open_blobs("nonsense://bucket/x")


CLIENT, NAME = "c" * 32, digest(b"0123456789")


def test_an_upload_goes_on_where_it_broke(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    assert uploads.stored(CLIENT, NAME) == 0
    uploads.begin(CLIENT, NAME, 0)
    uploads.write(CLIENT, NAME, 0, b"01234")
    assert uploads.stored(CLIENT, NAME) == 5
    uploads.begin(CLIENT, NAME, 3)
    assert uploads.stored(CLIENT, NAME) == 3
    uploads.write(CLIENT, NAME, 3, b"3456789")
    assert uploads.path(CLIENT, NAME).read_bytes() == b"0123456789"


def test_a_late_write_of_a_broken_call_does_no_harm(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.begin(CLIENT, NAME, 0)
    uploads.write(CLIENT, NAME, 0, b"01234")
    uploads.begin(CLIENT, NAME, 5)
    uploads.write(CLIENT, NAME, 5, b"56789")
    uploads.write(CLIENT, NAME, 5, b"567")
    assert uploads.path(CLIENT, NAME).read_bytes() == b"0123456789"


def test_a_client_has_one_upload(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    other = digest(b"other")
    for client, name in ((CLIENT, NAME), ("d" * 32, NAME), (CLIENT, other)):
        uploads.begin(client, name, 0)
        uploads.write(client, name, 0, b"01")
    assert uploads.stored(CLIENT, NAME) == 0
    assert uploads.stored(CLIENT, other) == 2
    assert uploads.stored("d" * 32, NAME) == 2
    uploads.keep_only([CLIENT])
    assert uploads.stored(CLIENT, other) == 2
    assert uploads.stored("d" * 32, NAME) == 0
    uploads.forget(CLIENT)
    assert uploads.stored(CLIENT, other) == 0


def test_outgoing_payloads_are_checked_and_forgotten(tmp_path: Path) -> None:
    outgoing = Outgoing(tmp_path)
    kept, gone = outgoing.put(b"kept"), outgoing.put(b"gone")
    assert outgoing.holds(kept)
    assert (outgoing.size(kept), outgoing.read(kept, 1, 2)) == (4, b"ep")
    outgoing.keep_only([kept])
    assert not outgoing.holds(gone)
    assert (outgoing.size(gone), outgoing.read(gone, 0, 9)) == (None, b"")
    outgoing.path(kept).write_bytes(b"kep")
    assert not outgoing.holds(kept), "cut short by a power cut"
