"""What is on its way in an asynchronous simulation, as its checkpoint has it.

`meta` holds `flights`: the clock, the number of turns, the boards at work, and of every version they were
sent its bit-widths and records. Its tensors are the arrays `version-NUMBER/weights/NAME` and
`version-NUMBER/side/NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedmpq.lab.gathered import Flight, Flights
from fedmpq.method.archive import Tensors
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.graph import Graph


def flights_meta(flights: Flights | None) -> dict[str, Any]:
    """What goes into a checkpoint's `meta`."""
    if flights is None:
        return {}
    versions = [
        {
            "version": number,
            "bit_widths": model.bit_widths,
            "clients": [asdict(client) for client in model.clients],
            "dealt": sorted(model.dealt.items()),
        }
        for number, model in sorted(flights.versions.items())
    ]
    flying = [asdict(flight) for flight in flights.open]
    return {"flights": {"now": flights.now, "turns": flights.turns, "open": flying, "versions": versions}}


def flights_arrays(flights: Flights | None) -> dict[str, Any]:
    """The tensors of the versions in flight."""
    versions = flights.versions if flights is not None else {}
    return {
        f"version-{number}/{name}": tensor
        for number, model in sorted(versions.items())
        for name, tensor in Tensors.of(model).to_arrays().items()
    }


def stored_flights(graph: Graph, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> Flights | None:
    """What those two gave."""
    if (stored := meta.get("flights")) is None:
        return None
    versions = {each["version"]: _version(graph, each, arrays) for each in stored["versions"]}
    flying = tuple(Flight(**flight) for flight in stored["open"])
    return Flights(stored["now"], stored["turns"], flying, versions)


def _version(graph: Graph, stored: Mapping[str, Any], arrays: Mapping[str, Any]) -> GlobalModel:
    prefix = f"version-{stored['version']}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in arrays.items() if name.startswith(prefix)}
    clients = stored_records(stored["clients"])
    model = Tensors.from_arrays(graph, own).after(stored["version"], tuple(stored["bit_widths"]), clients)
    return replace(model, dealt={client: tuple(widths) for client, widths in stored["dealt"]})


def stored_records(records: Sequence[Mapping[str, Any]]) -> tuple[ClientRecord, ...]:
    """Clients as JSON has them."""
    return tuple(
        ClientRecord(**{**record, "dealt": _widths(record["dealt"]), "returned": _widths(record["returned"])})
        for record in records
    )


def _widths(stored: list[int] | None) -> tuple[int, ...] | None:
    return None if stored is None else tuple(stored)
