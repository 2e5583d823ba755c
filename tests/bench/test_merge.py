import json

import pytest

from bench import merge
from tests.server.small_model import GRAPH, first_state


def test_json_is_one_object_with_every_kernel_and_merge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(merge, "LAYER_WEIGHTS", (1_000, 2_001))
    monkeypatch.setattr(merge, "MODELS", ("small",))
    monkeypatch.setattr(merge, "make_first_model", lambda *_: (GRAPH, *first_state(0)))
    words = ["merge", "--json", "--repetitions", "2", "--seconds", "1e-4", "--boards", "4"]
    words += ["--kernel-repetitions", "3"]
    monkeypatch.setattr("sys.argv", words)
    merge.main()
    facts = json.loads(capsys.readouterr().out)
    assert {(each["weights"], each["bits"], each["boards"]) for each in facts["kernel"]} == {
        (weights, bits, boards) for weights in (1_000, 2_001) for bits in (2, 4, 8) for boards in (1, 8)
    }
    assert [(each["model"], each["rule"]) for each in facts["merges"]] == [
        ("small", "mean"),
        ("small", "agreement"),
    ]
    assert all(each["seconds"]["least"] > 0 < each["share_of_memcpy"]["least"] for each in facts["kernel"])
    assert all(each["seconds_an_update"]["least"] > 0 < each["weights"] for each in facts["merges"])
    assert len(facts["load_average_before"]) == len(facts["load_average_after"]) == 3
