"""A client's round in a file: made here with torch, trained anywhere without it, to end with the same bits.

`python -m tools.rounds ROUND.npz RESULT.npz THREADS` trains it with the native engine and prints one JSON
object: the instruction set, the greatest resident memory in MB, and which of `HEAVY` the process has loaded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, TrainingPlan, pack_layers
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.training.local_round import run_local_round
from fedmpq.training.native_engine import NativeEngine

HEAVY = ("torch", "torchvision", "onnx", "onnxruntime")
MIXED_BITS = (8, 4, 3, 6, 2, 5)

Arrays = dict[str, NDArray[Any]]
_save: Any = np.savez  # its stub takes every keyword for the one flag it has


class Round(NamedTuple):
    graph: Graph
    assignment: Assignment
    data: Dataset


def make(path: Path, model: str, shape: tuple[int, int, int], samples: int, plan: TrainingPlan) -> None:
    """Writes a round of a network from the zoo: layers of mixed widths, random images of shape (C, H, W)."""
    import torch

    from fedmpq.model import zoo
    from fedmpq.model.module_state import initial_state
    from fedmpq.model.trace import trace

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = zoo.build(model, classes=10, channels=shape[0])
    example = torch.zeros(1, *shape)
    graph = trace(module, example, name=model, activation_bits=4, input_scale=1 / 64, input_zero_point=110)
    weights, side = initial_state(module, graph)
    random = np.random.default_rng(0)
    arrays: Arrays = {
        "graph": np.frombuffer(graph.to_bytes(), np.uint8),
        "plan": np.frombuffer(json.dumps(asdict(plan)).encode(), np.uint8),
        "images": random.integers(0, 256, (samples, *shape[1:], shape[0]), dtype=np.uint8),
        "labels": random.integers(0, 10, samples),
    }
    arrays |= {f"side/{name}": tensor for name, tensor in side.items()}
    for (name, weight), bits in zip(weights.items(), cycle(MIXED_BITS), strict=False):
        layer = QuantizedLayer.from_weights(weight, bits, "least_error", False)
        arrays |= {f"codes/{name}": layer.codes, f"step/{name}": layer.step, f"bits/{name}": np.array(bits)}
    _save(path, **arrays)


def load(path: Path) -> Round:
    with np.load(path) as stored:
        arrays = dict(stored)
    graph = Graph.from_bytes(arrays["graph"].tobytes())
    plan = TrainingPlan(**json.loads(arrays["plan"].tobytes()))
    layers = {
        name: QuantizedLayer(codes, int(arrays[f"bits/{name}"]), arrays[f"step/{name}"])
        for name, codes in _part(arrays, "codes").items()
    }
    classes = tuple(map(str, range(graph.shapes[graph.output][0])))
    return Round(
        graph,
        Assignment(1, 2, 3, pack_layers(layers), _part(arrays, "side"), plan),
        Dataset(arrays["images"], arrays["labels"], classes),
    )


def train(path: Path, threads: int) -> Arrays:
    """What the round ends with: every layer's planes, every side tensor, the loss."""
    update = run_local_round(NativeEngine(threads), *load(path))
    ended: Arrays = {"loss": np.array(update.loss)}
    ended |= {f"planes/{name}": layer.planes for name, layer in update.layers.items()}
    return ended | {f"side/{name}": tensor for name, tensor in update.side.items()}


def peak_mb() -> float:
    """The greatest resident memory of this process; getrusage would count that of its parent too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _part(arrays: Arrays, part: str) -> Arrays:
    start = f"{part}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def main() -> None:
    source, result, threads = sys.argv[1:]
    _save(result, **train(Path(source), int(threads)))
    loaded = [name for name in HEAVY if name in sys.modules]
    print(json.dumps({"isa": kernels.isa(), "peak_mb": peak_mb(), "heavy": loaded}))


if __name__ == "__main__":
    main()
