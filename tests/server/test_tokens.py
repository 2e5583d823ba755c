"""Enrolment tokens: their text, what is kept of them, and who may enrol with one at which time."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.server.store.errors import TokenRefused
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import open_store
from fedmpq.server.tokens import TokenError, looks_like_token, make_token, token_digest, token_id_of

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = open_store(database_url)
    try:
        yield store
    finally:
        store.close()


def test_a_token_is_long_random_and_easy_to_recognise() -> None:
    texts = {make_token(NOW).text for _ in range(100)}
    assert len(texts) == 100
    for text in texts:
        assert text.startswith("fmq_")
        assert len(text) == 47
        assert looks_like_token(text)


@given(st.text())
def test_anything_else_is_seen_not_to_be_one(text: str) -> None:
    assert not looks_like_token(text)
    assert not looks_like_token(f"{make_token(NOW).text}{text or ' '}")


def test_only_the_hash_is_in_the_record() -> None:
    token = make_token(NOW, client_name="camera-1")
    assert token.record.digest == hashlib.sha256(token.text.encode()).digest() == token_digest(token.text)
    assert token.record.token_id == token.record.digest.hex()[:12] == token_id_of(token.record.digest)
    assert token.text not in repr(token.record)
    assert token.text.removeprefix("fmq_") not in repr(token.record)


def test_who_may_enrol() -> None:
    token = make_token(NOW, uses=2, days=1).record
    assert token.refusal("anyone", NOW) is None
    assert token.refusal("anyone", NOW + timedelta(days=1, seconds=-1)) is None
    assert token.refusal("anyone", NOW + timedelta(days=1)) == "the token expired on 2030-01-03"
    assert replace(token, uses_left=0).refusal("anyone", NOW) == "the token is used up"
    assert replace(token, revoked=True).refusal("anyone", NOW) == "the token was revoked"
    named = make_token(NOW, client_name="camera-1").record
    assert named.refusal("camera-1", NOW) is None
    assert named.refusal("camera-2", NOW) == "the token is for the client 'camera-1'"
    endless = make_token(NOW, uses=None, days=None).record
    assert endless.refusal("anyone", NOW + timedelta(days=36500)) is None


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "valid"),
        ({"uses_left": 0}, "used"),
        ({"uses_left": None}, "valid"),
        ({"expires": NOW}, "expired"),
        ({"expires": None}, "valid"),
        ({"revoked": True, "expires": NOW, "uses_left": 0}, "revoked"),
    ],
)
def test_its_state_in_a_word(change: dict, state: str) -> None:
    assert replace(make_token(NOW).record, **change).state(NOW) == state


@pytest.mark.parametrize("uses", [0, -1, 1_000_001])
def test_an_impossible_number_of_uses(uses: int) -> None:
    with pytest.raises(TokenError, match=f"cannot be for {uses} uses; take 1 to 1000000, or --many"):
        make_token(NOW, uses=uses)


@pytest.mark.parametrize("days", [0.0, -1.0, 36501.0, float("inf"), float("nan")])
def test_an_impossible_number_of_days(days: float) -> None:
    with pytest.raises(TokenError, match="take more than 0, at most 36500"):
        make_token(NOW, days=days)


# In the store


def test_the_store_gives_back_what_it_was_given(store: Store) -> None:
    records = [
        make_token(NOW, uses=None, days=None).record,
        make_token(NOW + timedelta(seconds=1), uses=3, days=2.5, client_name="camera-1").record,
    ]
    for record in records:
        store.add_token(record)
    assert store.list_tokens() == records
    assert store.revoke_token(records[0].token_id, NOW.timestamp())
    assert store.list_tokens() == [replace(records[0], revoked=True), records[1]]
    assert not store.revoke_token("000000000000", NOW.timestamp())


def test_a_race_for_the_last_use_has_one_winner(store: Store) -> None:
    token = make_token(datetime.now(timezone.utc), uses=3)
    store.add_token(token.record)
    refused: list[str] = []
    start = threading.Barrier(8)

    def enrol(name: str) -> None:
        start.wait()
        try:
            store.enrol(token.record.digest, name, 4.0, "1", b"s" * 32, None, time.time())
        except TokenRefused:
            refused.append(name)

    threads = [threading.Thread(target=enrol, args=(f"client-{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert len(store.list_clients()) == 3
    assert [record.uses_left for record in store.list_tokens()] == [0]
