"""What the dashboard shows: places, which are a server's folder or a simulation's, and the runs in them.

Everything that a place gives is plain, as JSON has it. The page reads it by these names:

    place   key, kind ("server" or "simulation"), path, running, note, disk, runs, boards
    run     run_id, name, state, reason, round, rounds, created, ended, live, exports
    told    round, rounds, layers, fp32_bytes, metric, models

`live` is what the open round does, as `fedmpq status --json` tells it; `boards` are the clients in the same
form; `exports` changes when models were made. `rounds` of what is told are `method.history.RoundFacts`, with
bit-widths as a digit for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from fedmpq.method.history import RoundFacts
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.metrics import METRICS

Facts = dict[str, Any]
FLOAT_BYTES = 4


class DashboardError(ValueError):
    """A folder that holds no run, or a request for what is not there."""


class NotThere(LookupError):
    """A run or file that a request names and that is not there, or no longer."""


def moment_text(seconds: float) -> str:
    """A moment since 1970 as the page and `fedmpq status --json` have it."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Place(Protocol):
    """One folder that runs are in. Its methods read files and databases: they are called in threads."""

    key: str

    def look(self) -> Facts:
        """What is known of it now."""

    def told(self, run_id: str, after: int) -> Facts:
        """What a run did in the rounds after `after`, and what else is known of it."""

    def model_file(self, run_id: str, folder: str, name: str) -> Path:
        """A file that `told` has among its models."""


def rounds_facts(rounds: Iterable[RoundFacts]) -> list[Facts]:
    """As plain values; bit-widths take a digit each, for there are many."""
    told = []
    for facts in rounds:
        plain = asdict(facts)
        for part in (plain, *plain["clients"]):
            part["bit_widths"] = _digits(part["bit_widths"])
        told.append(plain)
    return told


def _digits(widths: Sequence[int]) -> str:
    """Full precision has none to show."""
    return "".join(map(str, widths)) if all(width <= MAX_BITS for width in widths) else ""


def graph_facts(graph: Graph) -> Facts:
    """Its layers, the bytes of a whole model of it in full precision with its side tensors, and the metric of
    its task."""
    names, sizes = [node.name for node in graph.layers], graph.layer_sizes
    side = sum(math.prod(shape) for shape in graph.side_shapes().values())
    return {
        "layers": [{"name": name, "weights": size} for name, size in zip(names, sizes, strict=True)],
        "fp32_bytes": FLOAT_BYTES * (sum(sizes) + side),
        "metric": asdict(METRICS[graph.task]),
    }


def place_of(places: Sequence[Place], key: str) -> Place:
    """The place that a request names."""
    for place in places:
        if place.key == key:
            return place
    raise NotThere(f"there is no place {key!r}")
