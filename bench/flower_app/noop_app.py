"""Flower's side of bench/federation.py: FedAvg over clients that train nothing.

A client returns the arrays it got with a little added, its own little each round: Flower does not send what
its store has already, and training never ends with arrays that are there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


class StampedFedAvg(FedAvg):
    """FedAvg that writes a line for every round: the moment it was merged, and of how many clients."""

    def __init__(self, clients: int, stamps: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self._stamps = stamps

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        merged = super().aggregate_train(server_round, replies)
        good = sum(not reply.has_error() for reply in replies)
        with self._stamps.open("a", encoding="ascii") as file:
            file.write(f"{time.monotonic()} {good}\n")
        return merged


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    shapes = json.loads(Path(str(config["shapes"])).read_text(encoding="ascii"))
    draws = np.random.default_rng(0)
    arrays = ArrayRecord([np.asarray(draws.standard_normal(shape, np.float32)) for shape in shapes])
    strategy = StampedFedAvg(int(config["clients"]), Path(str(config["stamps"])))
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]))


@client.train()
def train(message: Message, _: Context) -> Message:
    little = np.float32(np.random.default_rng().uniform(1e-3, 2e-3))
    got = message.content["arrays"].to_numpy_ndarrays()
    arrays = ArrayRecord([np.asarray(array + little) for array in got])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
