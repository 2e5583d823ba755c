"""The account of an exported file's bytes."""

from __future__ import annotations

import json
import sys

import pytest

from bench import onnx_bytes

TOTALS = ("bits of the weights", "file", "ratio")


def test_the_parts_sum_to_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.onnx_bytes", "--model", "resnet20", "--json"])
    onnx_bytes.main()
    facts = json.loads(capsys.readouterr().out)
    fresh, flat = facts["as initialised"], facts["flat codes"]
    for each in (fresh, flat):
        assert sum(size for part, size in each.items() if part not in TOTALS) == each["file"]
        assert min(each.values()) >= 0
    assert fresh["ratio"] <= 1.0
    assert fresh["outliers"] > 0
    assert flat["ratio"] <= 1.08
    assert flat["bit-planes"] == flat["bits of the weights"]
