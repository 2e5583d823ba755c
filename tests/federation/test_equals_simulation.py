"""A federation over mutual TLS and a simulation with the same seed end with the same W, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fedmpq
from fedmpq.method.history import PHASES, RoundFacts
from tests.federation.federation import Federation, assert_same


@pytest.mark.parametrize(("per_round", "database"), [(4, "sqlite"), (2, "postgresql")], indirect=["database"])
def test_the_same_seed_gives_the_same_model(tmp_path: Path, per_round: int, database: str | None) -> None:
    budgets = (2, 4, 6, 8)
    settings = {"profile": "paper", "clients_per_round": per_round, "min_clients": 4}
    with Federation(tmp_path, budgets, settings, database) as federation:
        federation.start_server()
        federation.start_boards()
        assert_same(federation.finish(), federation.simulated())


def test_so_it_does_with_an_average_and_measured_statistics(tmp_path: Path) -> None:
    settings = {"profile": "best", "clients_per_round": 2, "min_clients": 3}
    with Federation(tmp_path, (2, 4, 8), settings) as federation:
        federation.start_server()
        federation.start_boards()
        model = federation.finish()
        assert_same(model, federation.simulated())
    assert_same_history(tmp_path / "state", tmp_path / "simulated")
    weights = [name for name in model if name.startswith("weights/")]
    # Three rounds: the average is no longer the model itself.
    assert all(model[name].tobytes() != model[f"average-{name}"].tobytes() for name in weights)
    boards = [(tmp_path / f"board-{number}.log").read_text() for number in range(3)]
    assert all("round 3 of 3, statistics" in text for text in boards), "at the end everybody measures"
    assert sum("round 1 of 3, statistics" in text for text in boards) == 2, "before, those who trained"


def assert_same_history(state: Path, simulated: Path) -> None:
    """All but the seconds, the clients' names, and the accuracy of `W`, which no device runs."""
    served, alone = (fedmpq.load_run(folder).history.rounds for folder in (state, simulated))
    for one, two in zip(served, alone, strict=True):
        assert _compared(one) == _compared(two)
        assert one.phases.keys() == two.phases.keys() == set(PHASES)


def _compared(facts: RoundFacts) -> RoundFacts:
    clients = tuple(replace(each, name="") for each in facts.clients)
    return replace(facts, accuracy=None, seconds=0.0, phases={}, clients=clients)
