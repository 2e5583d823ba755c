"""A short soak: every fault there is, and the checker at the end. `tests.soak.soak` is the long one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import postgres
from tests.soak.soak import Report, Sample, soak

ROUNDS = 110


def test_a_short_soak(tmp_path: Path) -> None:
    try:
        report = soak(tmp_path, ROUNDS, seed=1)
    except postgres.NoPostgres as reason:
        pytest.skip(str(reason))
    assert not report.violations, report.violations
    assert not report.grown(), report.grown()
    assert report.faults.keys() == {"killed", "disk full", "liar", "vanished", "database crashed"}
    assert report.receipts > ROUNDS
    assert report.rejections > 0


def test_what_grows_is_seen() -> None:
    steady = Sample(1, 100.0, 20, 10.0, 12, 0.0)
    report = Report(90, samples=[replace(steady, round=number) for number in range(90)])
    assert report.grown() == []
    report.samples[80] = replace(steady, memory_mb=180.0, descriptors=90, files=200, disk_kb=900.0)
    assert [one.partition(":")[0] for one in report.grown()] == [
        "memory_mb",
        "descriptors",
        "files",
        "disk_kb",
    ]
