from __future__ import annotations

import json
import sys

import pytest

from bench import watched


def test_rounds_are_measured_with_and_without_an_onlooker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench.watched", "--model", "inertial_cnn", "--rounds", "1", "--repetitions", "1", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    watched.main()
    facts = json.loads(capsys.readouterr().out)
    alone, seen = facts["seconds_per_round"]["median"], facts["watched_seconds_per_round"]["median"]
    assert facts["watched_per_alone"]["median"] == pytest.approx(seen / alone)
    assert watched.table(facts).count("\n") == 4
