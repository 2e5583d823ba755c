"""An upload that goes on at another front-end, to the byte, wherever it broke off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq.server import shared_uploads
from fedmpq.server.blobs import BlobsAway, open_blobs
from fedmpq.server.own_blobs import FrontBlobs, open_own_blobs
from fedmpq.server.shared_uploads import SharedUploads
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import open_store
from tests.server.facts import add_token, enrol

NAME = b"n" * 32


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


def front(folder: Path, store: Store, number: int) -> SharedUploads:
    open_own_blobs(store, str(folder / "blobs"), folder / "own")
    blobs = FrontBlobs(open_blobs(str(folder / "blobs")), store, store.fact("id"), "blobs")
    return SharedUploads(folder / f"front-{number}", store, blobs)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(min_size=1, max_size=60),
    calls=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(0, 6), st.booleans())),
)
def test_pieces_from_any_front_end_are_the_upload(
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    calls: list[tuple[int, int, int, bool]],
) -> None:
    """Each call is at one of two front-ends, begins at most so many bytes before what is stored, sends some
    more in chunks and then breaks off, or its front-end is killed; the last one sends the rest."""
    monkeypatch.setattr(shared_uploads, "PART_BYTES", 8)
    known = store.list_clients()
    client = known[0].client_id if known else enrol(store, add_token(store), "a")
    store.forget_upload(client, NAME)
    fronts = [front(tmp_path, store, number) for number in (0, 1)]
    for which, count, back, killed in calls:
        start = fronts[which].stored(client, NAME)
        at = begun(fronts[which], client, max(0, start - back))
        send(fronts[which], client, data[at : at + count], at)
        if killed:
            fronts[which] = front(tmp_path, store, which)
        else:
            fronts[which].settle(client, NAME)
            assert fronts[1 - which].stored(client, NAME) == max(at, min(at + count, len(data)))
    last = fronts[1]
    at = begun(last, client, last.stored(client, NAME))
    send(last, client, data[at:], at)
    assert last.path(client, NAME).read_bytes() == data
    last.drop(client, NAME)
    assert last.stored(client, NAME) == 0


def begun(uploads: SharedUploads, client: str, at: int) -> int:
    uploads.begin(client, NAME, at)
    return at


def send(uploads: SharedUploads, client: str, data: bytes, at: int) -> None:
    for start in range(0, len(data), 3):
        uploads.write(client, NAME, at + start, data[start : start + 3])


def test_a_piece_that_is_lost_is_sent_again(tmp_path: Path, store: Store) -> None:
    client = enrol(store, add_token(store), "a")
    first, second = front(tmp_path, store, 0), front(tmp_path, store, 1)
    first.begin(client, NAME, 0)
    first.write(client, NAME, 0, b"01234")
    first.settle(client, NAME)
    (part,) = store.upload_parts(client, NAME)
    open_blobs(str(tmp_path / "blobs")).delete(part.blob)
    with pytest.raises(BlobsAway, match="ask for its offset again"):
        second.begin(client, NAME, 5)
    assert second.stored(client, NAME) == 0


def test_another_upload_of_the_client_takes_its_place(tmp_path: Path, store: Store) -> None:
    client = enrol(store, add_token(store), "a")
    first, second = front(tmp_path, store, 0), front(tmp_path, store, 1)
    first.begin(client, NAME, 0)
    first.write(client, NAME, 0, b"01234")
    first.settle(client, NAME)
    second.begin(client, b"m" * 32, 0)
    assert first.stored(client, NAME) == 0
