"""What every store must do with versions of models: part of the conformance suite, SQLite and PostgreSQL."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.server.store.errors import NoVersion, StoreError, UnknownRelease, UnknownRun
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Installation, ModelReport, Release, RoundAddress, Run
from fedmpq.server.store.releases import chosen_first, error_share
from fedmpq.server.store.sql import open_store
from tests.server.facts import NOW, commit, opened, queue

FILES = {"onnx": ["aa" * 32, "bb" * 32]}
WEEK = 7 * 86400.0


@dataclass
class Fleet:
    """A run of boards in a store, and the reports that they send."""

    store: Store
    run: Run
    boards: list[str]

    def release(self, share: float = 0.5, number: int = 1, soak: float = 10.0, now: float = NOW) -> Release:
        return self.store.add_release(self.run.run_id, number, FILES, share, 0.2, soak, now)

    def ask(self, board: str, now: float = NOW) -> int:
        due = self.store.release_for(board)
        assert due is not None
        release, number = due
        assert number == self.boards.index(board)
        self.store.offer_release(board, release.version, "onnx", now)
        return release.version

    def report(
        self, board: str, version: int, ok: int, errors: int = 0, now: float = NOW, running: bool = True
    ) -> Release | None:
        return self.store.report_model(
            board, ModelReport(version, "onnx", ok, errors, "it does not load" * bool(errors), running), now
        )

    def make_full(self, **more: float) -> Release:
        release = self.release(soak=0.0, **more)  # type: ignore[arg-type]
        done = None
        for board in sorted(release.canary):
            assert self.ask(board) == release.version
        for board in sorted(release.canary):
            assert done is None
            done = self.report(board, release.version, 1)
        assert done is not None
        assert done.state == "full"
        return done

    def state(self, version: int) -> str:
        return self.store.release(version).state


@pytest.fixture
def fleet(database_url: str) -> Iterator[Fleet]:
    store = open_store(database_url)
    run = queue(store)
    opened(store, run, clients=4)
    store.close_round(RoundAddress(run.run_id, 1), "")
    store.commit_round(run.run_id, commit(1), NOW)
    yield Fleet(store, store.run(run.run_id), [member.client_id for member in store.members(run.run_id)])
    store.close()


def test_without_versions_there_is_nothing_to_say(fleet: Fleet) -> None:
    assert fleet.store.release_for(fleet.boards[0]) is None
    assert fleet.store.list_releases() == []
    assert fleet.store.released_rounds(fleet.run.run_id) == set()
    with pytest.raises(UnknownRelease):
        fleet.store.release(1)
    with pytest.raises(UnknownRun):
        fleet.store.add_release("no such run", 1, FILES, 0.5, 0.1, 0, NOW)
    with pytest.raises(StoreError, match="no version to take back"):
        fleet.store.roll_back(fleet.run.run_id, "", NOW)


def test_a_canary_is_for_some_boards_and_the_version_before_for_the_others(fleet: Fleet) -> None:
    first = fleet.make_full()
    second = fleet.release()
    assert len(second.canary) == 2
    for board in fleet.boards:
        assert fleet.ask(board) == (2 if board in second.canary else 1)
    assert fleet.store.list_releases() == [second, first]


def test_the_first_canary_is_withheld_from_the_others(fleet: Fleet) -> None:
    release = fleet.release()
    other = next(board for board in fleet.boards if board not in release.canary)
    with pytest.raises(NoVersion, match="on other boards first"):
        fleet.ask(other)


def test_a_run_has_one_canary_at_a_time(fleet: Fleet) -> None:
    fleet.release()
    with pytest.raises(StoreError, match="version 1 of run 'run' is in its canary"):
        fleet.release()


def test_errors_above_the_limit_take_a_canary_back(fleet: Fleet) -> None:
    fleet.make_full()
    canary = fleet.release()
    good, bad = sorted(canary.canary)
    assert {fleet.ask(good), fleet.ask(bad)} == {2}
    assert fleet.report(good, 2, 3) is None
    done = fleet.report(bad, 2, 0, 1, running=False)
    assert done is not None
    assert (done.state, done.reason) == ("rolled_back", "errors 50.0%, above 20.0%: it does not load")
    assert {fleet.ask(board) for board in fleet.boards} == {1}
    assert fleet.report(bad, 2, 0, 9, running=False) is None, "it was taken back already"


def test_few_errors_do_not(fleet: Fleet) -> None:
    canary = fleet.release()
    for board in sorted(canary.canary):
        fleet.ask(board)
    one, other = sorted(canary.canary)
    assert fleet.report(one, 1, 10) is None
    assert fleet.report(other, 1, 7, 3, NOW + 1) is None, "15 % on the mean"
    assert fleet.state(1) == "canary"


def test_a_good_canary_becomes_full_when_all_that_have_it_said_so_for_long_enough(fleet: Fleet) -> None:
    fleet.make_full()
    canary = fleet.release(soak=10.0)
    one, other = sorted(canary.canary)
    fleet.ask(one)
    fleet.report(one, 2, 1, now=NOW)
    fleet.ask(other, NOW + 5)
    assert fleet.report(one, 2, 2, now=NOW + 11) is None, "the other was offered it and is silent"
    assert fleet.report(other, 2, 1, now=NOW + 12) is None
    done = fleet.report(other, 2, 2, now=NOW + 22)
    assert done is not None
    assert done.state == "full"
    assert [release.state for release in fleet.store.list_releases()] == ["full", "superseded"]
    assert {fleet.ask(board) for board in fleet.boards} == {2}


def test_a_board_that_was_revoked_or_pinned_elsewhere_holds_nothing_up(fleet: Fleet) -> None:
    fleet.make_full()
    canary = fleet.release(share=0.75, soak=0.0)
    one, two, three = sorted(canary.canary)
    for board in canary.canary:
        fleet.ask(board)
    fleet.store.revoke_client(f"run-{fleet.boards.index(two)}", NOW)
    fleet.store.pin(three, 1)
    done = fleet.report(one, 2, 1)
    assert done is not None
    assert done.state == "full"


def test_a_board_that_is_away_for_a_week_gets_the_right_version(fleet: Fleet) -> None:
    fleet.make_full()
    away = fleet.boards[0]
    assert fleet.ask(away) == 1
    fleet.make_full(now=NOW + 1)
    assert fleet.ask(away, NOW + WEEK) == 2
    bad = fleet.release(now=NOW + WEEK)
    board = min(bad.canary)
    fleet.ask(board)
    fleet.report(board, 3, 0, 1, running=False)
    assert fleet.ask(away, NOW + 2 * WEEK) == 2


def test_a_pinned_board_stays_until_it_is_unpinned(fleet: Fleet) -> None:
    fleet.make_full()
    board = fleet.boards[3]
    fleet.store.pin(board, 1)
    second = fleet.make_full(share=1.0)
    assert board not in second.canary
    assert fleet.store.pins() == {board: 1}
    assert (fleet.ask(board), fleet.ask(fleet.boards[0])) == (1, 2)
    assert fleet.store.unpin(board)
    assert not fleet.store.unpin(board)
    assert fleet.ask(board) == 2
    with pytest.raises(UnknownRelease, match="no version 9"):
        fleet.store.pin(board, 9)


def test_the_operator_takes_a_full_version_back(fleet: Fleet) -> None:
    fleet.make_full()
    fleet.make_full()
    assert fleet.store.roll_back(fleet.run.run_id, "by hand", NOW).version == 2
    assert {fleet.ask(board) for board in fleet.boards} == {1}
    fleet.store.roll_back(fleet.run.run_id, "by hand", NOW)
    with pytest.raises(NoVersion, match="none before it"):
        fleet.ask(fleet.boards[0])


def test_files_stay_as_long_as_a_board_may_want_them(fleet: Fleet) -> None:
    for number in (1, 2, 3, 4):
        fleet.make_full(number=number)
        if number == 1:
            fleet.store.pin(fleet.boards[0], 1)
    fleet.release(number=5)
    assert fleet.store.released_rounds(fleet.run.run_id) == {1, 3, 4, 5}
    fleet.store.unpin(fleet.boards[0])
    assert fleet.store.released_rounds(fleet.run.run_id) == {3, 4, 5}


def test_only_a_board_that_was_offered_a_version_speaks_of_it(fleet: Fleet) -> None:
    release = fleet.release()
    other = next(board for board in fleet.boards if board not in release.canary)
    with pytest.raises(UnknownRelease, match="not offered version 1"):
        fleet.report(other, 1, 0, 1)
    with pytest.raises(UnknownRelease, match="not offered version 7"):
        fleet.report(other, 7, 0, 1)
    assert fleet.store.installations() == []


def test_who_runs_what(fleet: Fleet) -> None:
    board = min(fleet.make_full(share=1.0).canary)
    second = fleet.release(share=1.0)
    assert second.canary == set(fleet.boards)
    fleet.ask(board, NOW + 1)
    fleet.report(board, 2, 0, 1, NOW + 2, running=False)
    known = {each.version: each for each in fleet.store.installations() if each.client_id == board}
    assert (known[1].running, known[2].running) == (True, False), "it stays with the one that was good"
    assert known[2] == Installation(2, board, "onnx", False, NOW + 1, 0, 1, "it does not load", None, NOW + 2)


def test_what_was_stored_is_there_after_a_restart(fleet: Fleet, database_url: str) -> None:
    fleet.make_full()
    fleet.release()
    again = open_store(database_url)
    assert again.list_releases() == fleet.store.list_releases()
    assert again.installations() == fleet.store.installations()
    again.close()


# Choosing and judging, without a store


@given(st.sets(st.text(max_size=4), min_size=1, max_size=30), st.integers(1, 1000), st.floats(0.001, 1.0))
def test_the_first_boards_are_that_share_rounded_up_and_always_the_same(
    boards: set[str], version: int, share: float
) -> None:
    chosen = chosen_first(boards, version, share)
    shuffled = random.Random(version).sample(sorted(boards), len(boards))
    assert chosen == chosen_first(shuffled, version, share)
    assert chosen <= boards
    assert share * len(boards) <= len(chosen) < share * len(boards) + 1
    assert chosen <= chosen_first(boards, version, 1.0) == boards


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=20))
def test_every_board_weighs_the_same(counts: list[tuple[int, int]]) -> None:
    reports = [Installation(1, str(n), "onnx", True, NOW, ok, bad) for n, (ok, bad) in enumerate(counts)]
    share = error_share(reports)
    assert 0 <= share <= 1
    spoke = [each for each in reports if each.ok + each.errors]
    if spoke:
        # One board alone moves the mean by no more than its own weight.
        assert abs(error_share(reports[1:]) - share) <= 1 / len(spoke) + 1e-9 or len(spoke) == 1
