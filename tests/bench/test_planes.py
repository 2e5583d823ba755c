import json

import pytest

from bench import planes


def test_json_is_one_object_with_every_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planes, "RESNET20_WEIGHTS", 1_000)
    monkeypatch.setattr(planes, "BEYOND_CACHE_WEIGHTS", 2_001)
    monkeypatch.setattr("sys.argv", ["planes", "--json", "--repetitions", "2", "--seconds", "1e-4"])
    planes.main()
    facts = json.loads(capsys.readouterr().out)
    jobs = {(result["job"], result["weights"], result["bits"]) for result in facts["results"]}
    assert jobs == {
        (job, weights, bits)
        for job in ("pack", "unpack", "popcount")
        for weights in (1_000, 2_001)
        for bits in (2, 4, 8)
    }
    assert all(result["seconds"]["least"] > 0 for result in facts["results"])
    assert len(facts["load_average_before"]) == len(facts["load_average_after"]) == 3
