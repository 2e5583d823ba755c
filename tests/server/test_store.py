"""What every store must do, whatever keeps it: the conformance suite, passed by SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits
from fedmpq.server.store import enrolment
from fedmpq.server.store.errors import (
    NameTaken,
    StoreError,
    StoreFailed,
    TokenRefused,
    UnknownRound,
    UnknownRun,
    UpdateRefused,
)
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Answer, Answered, Member, Round, RoundAddress, Seat
from fedmpq.server.store.sql import open_store
from tests.server.facts import (
    MOMENT,
    NOW,
    add_answer,
    add_token,
    at_once,
    calibrated,
    commit,
    describe,
    enrol,
    member,
    open_calibration,
    opened,
    queue,
    seat,
)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = open_store(database_url)
    yield opened
    opened.close()


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
    store.mark_seen([client_id], NOW)
    with pytest.raises((NameTaken, TokenRefused)):
        enrol(store, token, "a", b"u" * 32)
    known = store.client_by_id(client_id)
    assert known is not None
    assert known.secret_hash == b"t" * 32, "an identity in use keeps its secret"


def test_what_a_client_says_of_itself_is_kept(store: Store) -> None:
    client_id = enrol(store, add_token(store), "a")
    described = describe(store, client_id, 2.0, 30, "2", "native", NOW + 1)
    assert described == store.client_by_id(client_id)
    said = described.budget, described.samples, described.version, described.engine, described.first_seen
    assert said == (2.0, 30, "2", "native", NOW + 1)
    assert describe(store, client_id, 2.0, 30, "2", "native", NOW + 2) == described
    again = describe(store, client_id, 2.0, 31, "2", "native", NOW + 3)
    assert (again.samples, again.first_seen) == (31, NOW + 1)


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
    assert store.unrevoked([old, new]) == {new: UNLIMITED}


def test_a_client_has_its_tokens_limits_until_it_gets_its_own(store: Store) -> None:
    token = add_token(store, uses=2, limits=ClaimLimits(max_samples=100))
    assert [one.limits for one in store.list_tokens()] == [ClaimLimits(max_samples=100)]
    first, second = enrol(store, token, "a"), enrol(store, token, "b")
    assert store.limit_client("b", ClaimLimits(max_budget=2.5))
    assert not store.limit_client("c", ClaimLimits(max_budget=2.5))
    assert store.unrevoked([first, second]) == {
        first: ClaimLimits(max_samples=100),
        second: ClaimLimits(max_budget=2.5),
    }
    capped = describe(store, first, 8.0, 10_000_000, "2", "native", NOW)
    assert (capped.samples, capped.counted_samples, capped.granted_budget) == (10_000_000, 100, 8.0)
    assert describe(store, second, 8.0, 30, "2", "native", NOW).granted_budget == 2.5
    assert store.revoke_client("b", NOW) == second
    assert not store.limit_client("b", UNLIMITED)


def test_a_client_is_renamed_and_nothing_else(store: Store) -> None:
    token = add_token(store, uses=3)
    first, second = enrol(store, token, "a"), enrol(store, token, "b")
    before = store.client_by_id(first)
    assert store.rename_client("a", "attic")
    assert before is not None
    assert store.client_by_id(first) == replace(before, name="attic")
    assert not store.rename_client("a", "other")
    with pytest.raises(NameTaken, match="'b' is enrolled"):
        store.rename_client("attic", "b")
    assert store.rename_client("attic", "attic")
    # The name that it had is free, and so is that of one who is gone.
    enrol(store, token, "a")
    assert store.revoke_client("b", NOW) == second
    assert store.rename_client("attic", "b")
    assert sorted(client.name for client in store.list_clients()) == ["a", "b"]


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


# Runs


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


def test_a_round_from_opening_to_commit(store: Store) -> None:
    run = queue(store)
    current = opened(store, run)
    assert [one.state for one in current.seats] == ["selected", "selected"]
    assert store.current_round(run.run_id) == current
    for client in range(2):
        add_answer(store, RoundAddress(run.run_id, 1), client, bytes([client]) * 32, 100)
    assert store.blobs_in_use() == {b"g" * 32, b"m" * 32, bytes(32), b"\1" * 32}
    after = store.commit_round(run.run_id, commit(1), NOW)
    assert (after.round, after.model, after.bit_widths) == (1, b"n" * 32, (4, 4, 3))
    assert (after.bytes_up, after.bytes_down, after.state) == (15, 19, "running")
    members = store.members(run.run_id)
    assert [one.record.dealt for one in members] == [(4, 4, 4)] * 2
    assert [one.record.returned for one in members] == [(3, 4, 4)] * 2
    assert [one.accuracy for one in members] == [0.5, None]
    assert [one.record.samples for one in members] == [10, 11], "a commit leaves what clients say alone"
    assert store.current_round(run.run_id) is None
    assert store.blobs_in_use() == {b"g" * 32, b"n" * 32}
    opened(store, run, number=2)
    assert [one.record.samples for one in store.members(run.run_id)] == [20, 20], "as dealt to again"
    assert [one.bytes_up for one in store.members(run.run_id)] == [7, 8], "and nothing else"
    ended = store.commit_round(run.run_id, commit(2, last=True, model=b"o" * 32), NOW + 1)
    assert (ended.state, ended.ended) == ("finished", NOW + 1)
    assert store.next_run() is None


def test_models_are_kept_as_long_as_asked(store: Store) -> None:
    run = queue(store)
    for number in range(1, 5):
        opened(store, run, number=number)
        store.commit_round(run.run_id, commit(number, model=bytes([number]) * 32, keep=3), NOW)
    assert store.blobs_in_use() == {b"g" * 32, b"\2" * 32, b"\3" * 32, b"\4" * 32}


def test_a_calibration_is_a_round_of_its_own_that_ends_the_run(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    with pytest.raises(StoreError, match="not due"):
        open_calibration(store, run)
    store.commit_round(run.run_id, commit(1, ready=False), NOW)
    assert store.run(run.run_id).ready == 0
    current = open_calibration(store, run)
    calibration = RoundAddress(run.run_id, 1, "calibration")
    assert (current.address, current.deadline) == (calibration, NOW + 5)
    assert current.trained == store.round(run.run_id, 1)
    assert store.current_round(run.run_id) == store.calibration(run.run_id, 1) == current
    receipt = add_answer(store, calibration, 0, b"s" * 32, 50)
    assert add_answer(store, calibration, 0, b"s" * 32, 50) == receipt
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, 1), 0, b"t" * 32, 50)
    assert b"s" * 32 in store.blobs_in_use()
    assert store.reject_answer(calibration, 1, "negative")
    assert store.members(run.run_id)[1].strikes == 1
    done = store.commit_calibration(run.run_id, calibrated(1, last=True), NOW)
    assert (done.state, done.ready, done.model) == ("finished", 1, b"c" * 32)
    assert (done.bytes_up, done.bytes_down) == (15 + 1, 19 + 5)
    trained = store.round(run.run_id, 1)
    assert (trained.model, trained.metrics) == (b"c" * 32, {"loss": 1.0, "calibrated_by": 1})
    assert store.members(run.run_id)[1].accuracy == 0.75
    assert store.blobs_in_use() == {b"g" * 32, b"c" * 32}
    with pytest.raises(StoreError, match="not open"):
        store.commit_calibration(run.run_id, calibrated(1), NOW)


def test_a_round_that_has_not_begun_is_unknown(store: Store) -> None:
    run = queue(store)
    with pytest.raises(UnknownRound, match=r"round 1 of run .* has not begun"):
        store.round(run.run_id, 1)
    assert store.current_round(run.run_id) is None
    assert opened(store, run) == store.round(run.run_id, 1)
    assert store.calibration(run.run_id, 1) is None
    assert (store.round(run.run_id, 1).metrics, store.round(run.run_id, 1).model) == ({}, None)


def test_a_number_in_a_run_is_one_client_s(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    before = store.members(run.run_id)
    for taken in (member(0, before[1].client_id), member(7, before[0].client_id)):
        with pytest.raises(StoreFailed):
            store.reopen_round(
                RoundAddress(run.run_id, 1),
                deadline=None,
                extended=True,
                cut=[],
                reason="",
                members=[taken],
                seats=[],
            )
    assert store.members(run.run_id) == before
    assert store.round(run.run_id, 1).extended == 0, "all or nothing"


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


def test_clients_of_a_large_fleet_are_asked_for_in_parts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "_AT_ONCE", 2)
    token = add_token(store, uses=None)
    ids = [enrol(store, token, f"client-{number}") for number in range(5)]
    store.revoke_client("client-3", NOW)
    assert store.unrevoked([*ids, "f" * 32]).keys() == set(ids) - {ids[3]}
    assert store.unrevoked([]) == {}


def test_an_update_repeated_is_an_update_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    receipts = set(at_once(lambda _: add_answer(store, RoundAddress(run.run_id, 1), 0, b"u" * 32, 100), 8))
    assert len(receipts) == 1
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, 1), 0, b"v" * 32, 100)
    current = store.current_round(run.run_id)
    assert current is not None
    assert [one.state for one in current.seats] == ["updated", "selected"]
    assert current.answers() == [(current.seats[0], Answer(b"u" * 32, 100, *receipts))]
    store.commit_round(run.run_id, commit(1), NOW)
    assert {add_answer(store, RoundAddress(run.run_id, 1), 0, b"u" * 32, 100)} == receipts, (
        "after the round, too"
    )


def outcomes(receipts: list[str | UpdateRefused]) -> list[int | str]:
    """Receipts by when each was first seen, and why the others were refused."""
    seen: dict[str, int] = {}
    return [seen.setdefault(one, len(seen)) if isinstance(one, str) else str(one) for one in receipts]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from((0, 1, 5)), st.sampled_from((b"u" * 32, b"v" * 32))), max_size=8))
def test_updates_that_come_together_are_taken_as_if_one_by_one(
    store: Store, answers: list[tuple[int, bytes]]
) -> None:
    found = []
    for together in (True, False):
        run = queue(store, f"run-{len(store.list_runs())}")
        opened(store, run)
        came, address = [Answered(*answer, 100) for answer in answers], RoundAddress(run.run_id, 1)
        batches = [came] if together else [[one] for one in came]
        receipts = [receipt for batch in batches for receipt in store.add_answers(address, batch)]
        current = store.current_round(run.run_id)
        assert current is not None
        held = [(seat.client, seat.state, seat.answer and seat.answer.payload) for seat in current.seats]
        stored = {answer.receipt_id for _, answer in current.answers()}
        assert stored == {receipt for receipt in receipts if isinstance(receipt, str)}
        found.append((outcomes(receipts), held))
    assert found[0] == found[1]


@pytest.mark.parametrize(("number", "client"), [(1, 5), (2, 0), (0, 0)])
def test_an_update_from_elsewhere_is_refused(store: Store, number: int, client: int) -> None:
    run = queue(store)
    before = opened(store, run)
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, number), client, b"u" * 32, 100)
    assert store.current_round(run.run_id) == before


def test_a_closed_round_takes_nothing_more(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    add_answer(store, RoundAddress(run.run_id, 1), 0, b"u" * 32, 100)
    closed = store.close_round(RoundAddress(run.run_id, 1), "too late")
    assert [one.state for one in closed.seats] == ["updated", "cut"]
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, 1), 1, b"v" * 32, 100)
    assert store.close_round(RoundAddress(run.run_id, 1), "again") == closed, "as after a crash"


def test_a_rejected_update_is_a_strike_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    assert store.reject_answer(RoundAddress(run.run_id, 1), 1, "bad")
    assert not store.reject_answer(RoundAddress(run.run_id, 1), 1, "bad")
    assert [one.strikes for one in store.members(run.run_id)] == [0, 1]
    with pytest.raises(UpdateRefused):
        add_answer(store, RoundAddress(run.run_id, 1), 1, b"u" * 32, 100)
    found = store.seat_of(RoundAddress(run.run_id, 1), store.members(run.run_id)[1].client_id)
    assert found is not None
    assert (found.state, found.reason) == ("rejected", "bad")


def test_a_reopened_round_has_new_clients_and_may_have_old_ones_again(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    late = member(2, enrol(store, add_token(store), "late"), budget=2.0, samples=7)

    def reopen(cut: list[int], members: list[Member], seats: list[Seat]) -> Round:
        address = RoundAddress(run.run_id, 1)
        return store.reopen_round(
            address,
            deadline=NOW + 5,
            extended=True,
            cut=cut,
            reason="it is gone",
            members=members,
            seats=seats,
        )

    current = reopen([1], [late], [seat(2)])
    assert store.members(run.run_id)[2] == late
    assert [one.state for one in current.seats] == ["selected", "cut", "selected"]
    assert (current.extended, current.deadline) == (1, NOW + 5)
    assert current.seats[1].reason == "it is gone"
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
    assert stored.state == "open"


def test_a_round_opens_once(store: Store) -> None:
    run = queue(store)
    opened(store, run)
    with pytest.raises(StoreError, match="moved on"):
        store.open_round(
            run.run_id, 5, target=1, deadline=None, bit_widths=(4,), members=[], seats=[], now=NOW
        )
    store.pause_run(run.run_id)
    with pytest.raises(StoreError):
        opened(store, run, number=1)
