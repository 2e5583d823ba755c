"""A server's run as Python reads it, and as the start and the method of another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedmpq
from fedmpq.data.named import load_named
from tests.federation.federation import Federation, assert_same

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_is_read_and_another_starts_from_it_with_a_method_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example's class is named in run.toml; the server, started here, finds it in the current folder."""
    monkeypatch.chdir(ROOT)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with Federation(first, (2, 8), {"rounds": 2, "min_clients": 2}) as federation:
        federation.start_server()
        federation.start_boards()
        federation.finish()
        stored = federation.stored()
    run = fedmpq.load_run(first / "state")
    assert [row["round"] for row in run.history] == [1, 2]
    assert run.history["clients"] == [2, 2]
    assert run.history[-1]["accuracy_2_bit"] is not None
    assert run.budgets == (2.0, 8.0)
    images = load_named("digits", test_limit=40)[1].images
    mine = run.deployed(client="board-0")
    (theirs, _) = stored.method.deployments(stored.model, stored.model.clients)
    assert np.array_equal(
        mine.logits(images),
        fedmpq.DeployedModel(stored.graph, theirs.layers, theirs.side).logits(images),
    )
    settings = {
        "rounds": 2,
        "min_clients": 2,
        "weights": str(first / "state"),
        "method": "examples.own_aggregation:MedianOfChanges",
    }
    with Federation(second, (2, 8), settings) as federation:
        federation.start_server()
        federation.start_boards()
        warm = federation.finish()
        assert_same(warm, federation.simulated())
    cold = {f"weights/{name}": tensor for name, tensor in run.model.weights.items()}
    assert any(cold[name].tobytes() != warm[name].tobytes() for name in cold)
