import json

import pytest

from bench import inference


def test_json_has_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inference, "TURN_SECONDS", 1e-4)
    monkeypatch.setattr(inference, "TRAINED_ROUNDS", 2)
    words = ["inference", "--model", "digits_cnn", "--bits", "4", "--repetitions", "2", "--json"]
    monkeypatch.setattr("sys.argv", words)
    inference.main()
    facts = json.loads(capsys.readouterr().out)
    assert facts["onnx_equal"] is True
    assert facts["executorch_codes_equal"] is True
    for name in ("onnx", "pte_xz", "fp32", "static_int8"):
        assert 0 < facts[f"{name}_size_ratio"] < 12
    for name in ("onnx", "executorch", "static_int8"):
        assert facts[f"{name}_speedup"] > 0
    for name in ("exported", "static_int8", "fp32"):
        # Ten classes: any of them has learnt something.
        assert 0.2 < facts[f"accuracy_{name}"] <= 1
    assert [each["batch"] for each in facts["batches"]] == [1, 64]
