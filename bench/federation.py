"""Rounds of a federation of two clients that train nothing: this project's beside Flower's.

The same model goes to both clients and back: in fp32 through Flower (FedAvg), at 4 bits per weight through
FedMPQ. Server and clients are processes of their own on one machine; every client has a TCP proxy before the
server that counts its bytes. The two take turns, each from a fresh start; start-up and the first round do not
count. A speed-up is taken between neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import flower, loopback
from bench.loopback import OwnRounds
from bench.machine import Machine, warn_if_busy
from bench.rounds import CLIENTS, Rounds
from bench.timing import Spread, Timings, load_average
from bench.workload import BUDGET, CLASSES, IMAGE, INPUT_SCALE, INPUT_ZERO_POINT, MODELS
from fedmpq.model.first_model import ImageFormat, make_first_model

OURS, FLOWER = "fedmpq", "flwr"
MEASURES = (
    ("seconds a round", "seconds_per_round", 1.0, ".3f"),
    ("kB up, a client", "bytes_up", 1e-3, ".1f"),
    ("kB down, a client", "bytes_down", 1e-3, ".1f"),
)
"""Title, name in the JSON object, scale and format of what both are measured by."""


@dataclass(frozen=True)
class Case:
    """What to measure."""

    model: str = "resnet20"
    rounds: int = 5
    """Measured in each turn."""
    repetitions: int = 3
    with_flower: bool = True

    @property
    def image(self) -> tuple[int, int, int]:
        channels, height, width = MODELS.get(self.model, IMAGE)
        return height, width, channels


@dataclass(frozen=True)
class Result:
    case: Case
    parameters: int
    """Weights and side tensors' numbers."""
    ours: list[OwnRounds]
    """One for each turn."""
    flower: list[Rounds]
    """As many, or none if it is not installed."""
    load_before: list[float]
    load_after: list[float]

    @property
    def speedup(self) -> Spread | None:
        """Flower's time / ours."""
        if not self.flower:
            return None
        timings = Timings({OURS: _turn_seconds(self.ours), FLOWER: _turn_seconds(self.flower)})
        return timings.ratio(FLOWER, OURS)

    @property
    def bytes_ratio(self) -> float | None:
        """Flower's bytes / ours, both ways together."""
        if not self.flower:
            return None
        theirs, own = _traffic(self.flower), _traffic(self.ours)
        return sum(spread.median for spread in theirs) / sum(spread.median for spread in own)

    def as_dict(self) -> dict[str, Any]:
        (up, down), seconds = _traffic(self.ours), _seconds(self.ours)
        payload = round(statistics.median([size for turn in self.ours for size in turn.payload]))
        their_seconds = _seconds(self.flower) if self.flower else None
        their_up, their_down = _traffic(self.flower) if self.flower else (None, None)
        spreads = {
            "seconds_per_round": seconds,
            "flwr_seconds_per_round": their_seconds,
            "speedup_vs_flwr": self.speedup,
            "bytes_up": up,
            "bytes_down": down,
            "flwr_bytes_up": their_up,
            "flwr_bytes_down": their_down,
        }
        return {
            "model": self.case.model,
            "parameters": self.parameters,
            "clients": CLIENTS,
            "budget": BUDGET,
            "rounds": self.case.rounds,
            "repetitions": self.case.repetitions,
            **{name: spread and _rounded(name, spread.median) for name, spread in spreads.items()},
            "bytes_are_of": "one client in one round",
            "bytes_ratio_vs_flwr": self.bytes_ratio and round(self.bytes_ratio, 2),
            "payload_bytes": payload,
            "bytes_up_per_payload": round(up.median / payload, 4),
            "bytes_down_per_payload": round(down.median / payload, 4),
            "server_peak_mb": max(turn.server_peak_mb for turn in self.ours),
            "flwr_version": flower.VERSION if self.flower else None,
            "spreads": {name: spread and spread.as_dict() for name, spread in spreads.items()},
            "load_average_before": self.load_before,
            "load_average_after": self.load_after,
        }


def _rounded(name: str, value: float) -> float:
    return round(value) if "bytes" in name else round(value, 4)


def _turn_seconds(turns: Sequence[Rounds]) -> list[float]:
    """Of a round, one number for each turn."""
    return [statistics.median(turn.seconds) for turn in turns]


def _seconds(turns: Sequence[Rounds]) -> Spread:
    return Spread.of([seconds for turn in turns for seconds in turn.seconds])


def _traffic(turns: Sequence[Rounds]) -> tuple[Spread, Spread]:
    """Up and down."""
    up = [float(size) for turn in turns for size in turn.up]
    return Spread.of(up), Spread.of([float(size) for turn in turns for size in turn.down])


def measure(case: Case) -> Result:
    """Flower's turns are left out, with a word on standard error, if it cannot be installed."""
    with_flower = case.with_flower and _flower_is_there()
    shapes = fp32_shapes(case)
    before = load_average()
    ours: list[OwnRounds] = []
    theirs: list[Rounds] = []
    with TemporaryDirectory(prefix="fedmpq-bench-") as scratch:
        for turn in range(case.repetitions):
            folder = Path(scratch) / str(turn)
            ours.append(loopback.run(case.model, case.image, BUDGET, case.rounds, folder / OURS))
            if with_flower:
                theirs.append(flower.run(shapes, case.rounds, folder / FLOWER))
    parameters = sum(math.prod(shape) for shape in shapes)
    return Result(case, parameters, ours, theirs, before, load_average())


def _flower_is_there() -> bool:
    try:
        flower.installed()
    except flower.FlowerError as error:
        print(f"measured without Flower: {error}", file=sys.stderr)
        return False
    return True


def fp32_shapes(case: Case) -> list[tuple[int, ...]]:
    """Of all that training changes in full precision."""
    image = ImageFormat(*case.image, INPUT_SCALE, INPUT_ZERO_POINT)
    _, weights, side = make_first_model(case.model, 0, CLASSES, image, activation_bits=None)
    return [tensor.shape for tensor in (*weights.values(), *side.values())]


def times_flower(facts: dict[str, Any], key: str) -> float:
    """Flower's / ours, of what was measured with Flower."""
    if key == "seconds_per_round":
        return float(facts["speedup_vs_flwr"])
    return float(facts[f"flwr_{key}"] / facts[key])


def table(facts: dict[str, Any]) -> str:
    """What `as_dict` says, for a terminal."""
    spreads = facts["spreads"]
    lines = [f"{'':22}{'FedMPQ':>12}{'Flower':>12}   Flower / FedMPQ"]
    for title, key, scale, form in MEASURES:
        own, theirs = spreads[key], spreads[f"flwr_{key}"]
        other = f"{theirs['median'] * scale:12{form}}" if theirs else f"{'-':>12}"
        ratio = f"{times_flower(facts, key):13.1f}" if theirs else ""
        lines.append(f"{title:22}{own['median'] * scale:12{form}}{other}{ratio}")
        for word in ("least", "greatest"):
            other = f"{theirs[word] * scale:12{form}}" if theirs else f"{'-':>12}"
            lines.append(f"{f'  {word}':22}{own[word] * scale:12{form}}{other}")
    up, down = facts["bytes_up_per_payload"], facts["bytes_down_per_payload"]
    return "\n".join(
        [
            *lines,
            f"payload {facts['payload_bytes'] / 1e3:.1f} kB: x{up:.4f} up, x{down:.4f} down;"
            f" the server's memory peaks at {facts['server_peak_mb']:.1f} MB",
            f"load average before {facts['load_average_before']}, after {facts['load_average_after']}",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.federation", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet20", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="measured in each turn (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each (default %(default)s)")
    parser.add_argument("--no-flower", action="store_true", help="measure FedMPQ alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    for name in ("rounds", "repetitions"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} is too few; the least is 1")
    warn_if_busy()
    case = Case(arguments.model, arguments.rounds, arguments.repetitions, not arguments.no_flower)
    facts = {"bench": "federation", **Machine.here().as_dict(), **measure(case).as_dict()}
    print(json.dumps(facts) if arguments.json else table(facts))


if __name__ == "__main__":
    main()
