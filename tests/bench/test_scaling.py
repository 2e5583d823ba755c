"""Threads against one thread: samples are told apart by whether cores shared a cache."""

from __future__ import annotations

import os

import pytest

from bench import core_distance, scaling, train_step
from bench.scaling import Sample, Scaling
from bench.train_step import Case


def test_near_and_far_cores_are_told_apart() -> None:
    found = Scaling("resnet20", 64, 2, (Sample(54, 1.8), Sample(60, 1.9), Sample(320, 1.2)))
    near, far = found.spread(True), found.spread(False)
    assert near is not None
    assert far is not None
    assert (near.least, near.greatest, far.median) == (1.8, 1.9, 1.2)
    assert "shared a cache (a line there and back in 57 ns)" in found.lines()
    assert (
        "**1.20** times as fast as one (1.20 to 1.20, samples: 1) while the cores shared none"
        in found.lines()
    )


def test_without_samples_nothing_is_claimed() -> None:
    found = Scaling("resnet20", 64, 2, ())
    assert found.spread(True) is found.spread(False) is None
    assert "not measured" in found.lines()


def test_samples_between_which_cores_were_moved_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = iter([50.0, 60.0, 50.0, 300.0, 310.0, 330.0])
    monkeypatch.setattr(core_distance, "nanoseconds", lambda: next(distances))
    monkeypatch.setattr(train_step, "TURN_SECONDS", 1e-3)
    found = scaling.measure(Case("digits_cnn", 2, threads=2), samples=3, pause=0)
    assert [sample.distance for sample in found.samples] == [55.0, 320.0]
    assert all(sample.times_faster > 0 for sample in found.samples)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_the_distance_of_cores_is_measured() -> None:
    assert 1 < core_distance.nanoseconds() < 1e6


def test_one_thread_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--threads", "1"])
    assert "the least is 2" in capsys.readouterr().err
