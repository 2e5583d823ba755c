"""The history of a run as its server's store has it, in the format of every run's history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmpq.method.history import BOARDS, TEST_DATA, ClientFacts, History, Outcome, RoundFacts
from fedmpq.server.round_facts import METRIC, OTHERS, PHASE_SECONDS
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run, Seat, SeatState

_OUTCOMES: dict[SeatState, Outcome] = {
    "selected": "late",
    "updated": "trained",
    "rejected": "rejected",
    "cut": "late",
    "declined": "declined",
}
_MEASURED_BY = {"server": TEST_DATA, "clients": BOARDS}


def run_history(store: Store, run: Run, first: int = 1) -> History:
    """Its merged rounds, from the round `first` on."""
    names = {client.client_id: client.name for client in store.list_clients(revoked=True)}
    of_client = {member.client: names[member.client_id] for member in store.members(run.run_id)}
    return History(_facts(store, run.run_id, number, of_client) for number in range(first, run.round + 1))


def _facts(store: Store, run_id: str, number: int, names: Mapping[int, str]) -> RoundFacts:
    stored = store.round(run_id, number)
    metrics: Mapping[str, Any] = stored.metrics
    return RoundFacts(
        round=number,
        loss=metrics["loss"],
        accuracy=None,
        deployed=metrics.get("deployed_accuracy") or {},
        mean_deployed=metrics.get("mean_deployed_accuracy"),
        measured_by=_MEASURED_BY.get(metrics.get("measured_by", ""), ""),
        bytes_up=metrics["bytes_up"],
        bytes_down=metrics["bytes_down"],
        bit_widths=tuple(metrics["bit_widths"]),
        seconds=metrics["seconds"],
        phases=metrics.get(PHASE_SECONDS, {}),
        clients=tuple(
            _client(seat, names[seat.client], stored.address.staleness(seat)) for seat in stored.seats
        ),
        undone=metrics.get("undone", ""),
        metric=metrics.get(METRIC, "accuracy"),
        others=metrics.get(OTHERS, {}),
    )


def _client(seat: Seat, name: str, staleness: int) -> ClientFacts:
    return ClientFacts(
        client=seat.client,
        name=name,
        outcome=_OUTCOMES[seat.state],
        reason="" if seat.state == "updated" else seat.reason,
        bit_widths=seat.bit_widths,
        bytes_up=0 if seat.answer is None else seat.answer.payload_bytes,
        bytes_down=seat.payload_bytes,
        staleness=staleness,
    )
