"""`python -m tests.federation.hostile_board KIND HISTORY.jsonl WORDS...`: `fedmpq WORDS...` of a board that
trains as others do and then sends something else. Its server is the real one, and so is the rest of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.cli.main import main
from fedmpq.edge_client import round_work, session
from fedmpq.exchange.messages import Update, pack_layers, unpack_layers
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from tests.history.recorded_board import watch
from tests.history.recording import Recorder

LOUDER = 5
"""How many times its length a change is sent with; `max_update_norm` lets that pass."""
CLAIM = 9_000_000

Lie = Callable[[Graph, Update], Update]


def turned_round(graph: Graph, update: Update) -> Update:
    """Every weight has moved the other way, and further."""
    layers = {}
    for name, layer in unpack_layers(graph, update.layers).items():
        codes = layer.codes.astype(np.int64)
        turned = 256 - codes if layer.bits == 8 else 2**layer.bits - 1 - codes
        layers[name] = replace(
            layer, codes=np.clip(turned, 0, 255).astype(np.uint8), step=layer.step * LOUDER
        )
    return replace(update, layers=pack_layers(layers))


def extreme(graph: Graph, update: Update) -> Update:
    """Every weight has moved as far as its code can say."""
    layers = {
        name: replace(layer, codes=np.full_like(layer.codes, 2**layer.bits - 1), step=layer.step * LOUDER)
        for name, layer in unpack_layers(graph, update.layers).items()
    }
    return replace(update, layers=pack_layers(layers))


def poisoned(graph: Graph, update: Update) -> Update:
    """Scales turned round, biases and clips far off, as far as the server believes them."""
    factors = {"weight": -3.0, "clip": 15.0, "running_var": 20.0, "bias": 1.0, "running_mean": 1.0}
    side = {}
    for name, tensor in update.side.items():
        kind = name.rpartition(".")[2]
        shift = 3.0 if kind in ("bias", "running_mean") else 0.0
        side[name] = np.asarray(tensor * factors[kind] + shift, np.float32)
    return replace(update, side=side)


def claimed(graph: Graph, update: Update) -> Update:
    """The other way round, and made of millions of images."""
    return replace(turned_round(graph, update), samples=CLAIM)


LIES: dict[str, Lie] = {
    "turned round": turned_round,
    "extreme codes": extreme,
    "poisoned side tensors": poisoned,
    "millions of images": claimed,
}


def begin_to_lie(kind: str) -> None:
    """From now on what this process has trained is sent as something else."""
    client_work: Any = round_work
    client_session: Any = session
    honest = client_work.run_local_round

    def dishonest(engine: Any, graph: Graph, *rest: Any) -> Update:
        return LIES[kind](graph, honest(engine, graph, *rest))

    client_work.run_local_round = dishonest
    if kind == "millions of images":
        real: Any = pb.ListenRequest

        class Proxy:
            ListenRequest = staticmethod(lambda **words: real(**{**words, "samples": CLAIM}))

            def __getattr__(self, name: str) -> Any:
                return getattr(pb, name)

        client_session.pb = Proxy()


if __name__ == "__main__":
    begin_to_lie(sys.argv[1])
    watch(Recorder(Path(sys.argv[2])))
    raise SystemExit(main(sys.argv[3:]))
