"""How often a dashboard looks: by a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fedmpq.dashboard.places import Facts
from fedmpq.dashboard.watch import LEAST_SECONDS, MOST_SECONDS, SHARE, Watch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Slow:
    """A place whose every look takes so long; it says what `words` are."""

    key = "0"

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.looks, self.words = clock, seconds, 0, "as ever"
        self.fails = False

    def look(self) -> Facts:
        self.clock.now += self.seconds
        self.looks += 1
        if self.fails:
            raise OSError("the disk is gone")
        return {"key": self.key, "words": self.words}

    def told(self, run_id: str, after: int) -> Facts:
        raise NotImplementedError

    def model_file(self, run_id: str, folder: str, name: str) -> Path:
        raise NotImplementedError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("fedmpq.dashboard.watch.asyncio.sleep", made.sleep)
    return made


@pytest.mark.parametrize("took", [0.0, 0.004, 0.02, 0.045])
def test_looking_takes_no_more_than_its_share(clock: Clock, took: float) -> None:
    place = Slow(clock, took)
    watch = Watch([place], clock)
    began = clock.now
    assert asyncio.run(watch.changed(0, 1.0))
    assert not asyncio.run(watch.changed(watch.version, 600.0))
    passed = clock.now - began
    assert place.looks * took <= passed / SHARE + took
    assert place.looks >= passed / MOST_SECONDS
    assert place.looks <= passed / LEAST_SECONDS + 2


def test_many_pages_cost_one_look(clock: Clock) -> None:
    place = Slow(clock, 0.0)
    watch = Watch([place], clock)

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(watch.newest() for _ in range(50)))

    assert len(set(asyncio.run(all_at_once()))) == 1
    assert place.looks == 1


def test_what_was_done_just_now_is_seen_at_once(clock: Clock) -> None:
    place = Slow(clock, 0.0)
    watch = Watch([place], clock)
    asyncio.run(watch.newest())
    place.words = "other"
    assert "other" not in asyncio.run(watch.newest())
    watch.look_at_once()
    assert "other" in asyncio.run(watch.newest())


def test_a_place_that_cannot_be_read_says_why_and_the_others_are_shown(clock: Clock) -> None:
    bad, good = Slow(clock, 0.0), Slow(clock, 0.0)
    bad.fails = True
    places = json.loads(asyncio.run(Watch([bad, good], clock).newest()))["places"]
    assert places[0]["note"] == "the disk is gone"
    assert places[0]["runs"] == []
    assert places[1] == {"key": "0", "words": "as ever"}
