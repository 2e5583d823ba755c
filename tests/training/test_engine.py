"""Engines by name."""

from __future__ import annotations

import pytest
import torch

from fedmpq.training import engine
from fedmpq.training.engine import DEFAULT_ENGINE, EngineError, engine_names, make_engine
from fedmpq.training.torch_engine import TorchEngine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_can_be_made_afresh(name: str) -> None:
    assert make_engine(name, threads=1) is not make_engine(name, threads=1)


def test_the_torch_engine_and_the_default_are_among_them() -> None:
    assert {"torch", DEFAULT_ENGINE} <= set(engine_names())
    assert isinstance(make_engine("torch"), TorchEngine)


def test_threads_reach_torch() -> None:
    make_engine("torch", threads=2)
    assert torch.get_num_threads() == 2
    make_engine("torch")
    assert torch.get_num_threads() == 2


def test_an_unknown_engine_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(EngineError, match=r"no engine 'tensorflow'.*torch"):
        make_engine("tensorflow")


def test_an_engine_that_cannot_be_loaded_is_an_error_and_no_other_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = engine._Entry("fedmpq.edge_client.no_such_module", "Engine", "pip install missing")
    monkeypatch.setitem(engine._ENGINES, "broken", entry)
    with pytest.raises(EngineError, match=r"'broken' cannot be loaded .*no_such_module.*pip install missing"):
        make_engine("broken")
