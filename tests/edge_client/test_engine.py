"""Engines by name."""

from __future__ import annotations

import pytest

from fedmpq.edge_client import engine
from fedmpq.edge_client.engine import EngineError, engine_names, make_engine
from fedmpq.edge_client.torch_engine import TorchEngine


def test_the_torch_engine_is_there() -> None:
    assert "torch" in engine_names()
    assert isinstance(make_engine("torch"), TorchEngine)


def test_every_call_makes_a_fresh_engine() -> None:
    assert make_engine("torch") is not make_engine("torch")


def test_an_unknown_engine_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(EngineError, match=r"no engine 'tensorflow'.*torch"):
        make_engine("tensorflow")


def test_an_engine_that_cannot_be_loaded_is_an_error_and_no_other_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = ("fedmpq.edge_client.no_such_module", "Engine", "pip install missing")
    monkeypatch.setitem(engine._ENGINES, "broken", entry)
    with pytest.raises(EngineError, match=r"'broken' cannot be loaded .*no_such_module.*pip install missing"):
        make_engine("broken")
