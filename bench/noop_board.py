"""A board that trains nothing: the client's own session around an engine that gives back what it got.

`python -m bench.noop_board` takes part in one run and writes, as JSON, what it noted of every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.edge_client.board_data import HeldData
from fedmpq.edge_client.channel import make_endpoint
from fedmpq.edge_client.session import Board, Session, Settings
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.exchange.change import Fractions
from fedmpq.exchange.messages import TrainingPlan, pack_layers, payload_bytes
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import Batch, EpochResult, Shift


class NoopEngine:
    """Keeps the models of all rounds, to be measured after the last.

    Its changes are normal draws, the same in every round: none at all would be coded in next to no bytes.
    """

    def __init__(self) -> None:
        self._models: list[tuple[float, Layers, Side]] = []
        self._fractions: dict[str, Fractions] = {}

    def load(
        self,
        graph: Graph,
        layers: Layers,
        side: Side,
        plan: TrainingPlan,
        draws: Draws,
        shift: Shift | None = None,
    ) -> None:
        self._models.append((time.monotonic(), layers, side))

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        return EpochResult(MIN_SAMPLES, 0.0, 0.0)

    def layers(self) -> Layers:
        return self._models[-1][1]

    def fractions(self) -> Mapping[str, Fractions]:
        for name, layer in self.layers().items():
            if name not in self._fractions:
                draws = np.random.default_rng(layer.codes.size).normal(0, 30, layer.codes.size)
                self._fractions[name] = np.clip(np.rint(draws), -127, 127).astype(np.int8)
        return self._fractions

    def side(self) -> Side:
        return self._models[-1][2]

    def rest(self) -> None:
        """It has nothing that only training needs."""

    def notes(self) -> dict[str, list[float] | list[int]]:
        """When each round's model was there, and the bytes of its planes, steps and side tensors."""
        return {
            "moments": [moment for moment, _, _ in self._models],
            "payload_bytes": [payload_bytes(pack_layers(layers), side) for _, layers, side in self._models],
        }


def _data(image: tuple[int, int, int], classes: int) -> HeldData:
    names = tuple(str(label) for label in range(classes))
    black = Dataset(np.zeros((MIN_SAMPLES, *image), np.uint8), np.zeros(MIN_SAMPLES, np.int64), names)
    return HeldData(black)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.noop_board", description=__doc__)
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    parser.add_argument("--token", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--image", type=int, nargs=3, required=True, metavar=("H", "W", "C"))
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    engine = NoopEngine()
    data = _data(tuple(arguments.image), arguments.classes)
    board = Board(arguments.name, arguments.budget, data, engine, "none", threads=1)
    settings = Settings(arguments.token, exit_when_done=True)
    with closing(StateFolder(arguments.state)) as state:
        asyncio.run(Session(make_endpoint(arguments.server, None), state, board, settings).run())
    arguments.notes.write_text(json.dumps(engine.notes()), encoding="ascii")


if __name__ == "__main__":
    main()
