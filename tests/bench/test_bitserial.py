import json

import pytest

from bench import bitserial
from fedmpq import kernels


def test_json_is_one_object_with_every_layer_and_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bitserial, "LAYERS", ((8, 3), (16, 2)))
    arguments = ["bitserial", "--json", "--images", "1", "--repetitions", "2", "--seconds", "1e-4"]
    monkeypatch.setattr("sys.argv", arguments)
    before = kernels.isa()
    bitserial.main()
    facts = json.loads(capsys.readouterr().out)
    measured = [(result["isa"], result["channels"], result["bits"]) for result in facts["results"]]
    assert measured == [
        (isa, channels, bits)
        for isa in kernels.supported_isas()
        for channels in (8, 16)
        for bits in (1, 2, 3, 4)
    ]
    assert all(result["bytes_over_bits"]["least"] > 0 for result in facts["results"])
    assert kernels.isa() == before
