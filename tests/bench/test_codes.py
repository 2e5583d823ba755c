"""The bench of entropy codes."""

from __future__ import annotations

import json
import sys

import pytest

from bench import codes


def test_codes_are_shorter_than_planes_where_zlib_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codes, "WEIGHTS", 20_000)
    monkeypatch.setattr(sys, "argv", ["bench.codes", "--repetitions", "1", "--json"])
    codes.main()
    facts = json.loads(capsys.readouterr().out)
    assert [result["bits"] for result in facts["results"]] == list(codes.BIT_WIDTHS)
    for result in facts["results"]:
        assert result["per_planes"] < 0.97 < result["zlib_per_planes"]
        assert min(result["encode_mb_s"], result["decode_mb_s"]) > 0
    assert "decode_mb_s" in codes.table(facts["results"])
