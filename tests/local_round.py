"""One local round of the native engine, from a file to a file: the same script here and on emulated boards.

`python local_round.py ROUND.npz RESULT.npz THREADS` prints one JSON object: the instruction set, the greatest
resident memory in MB, and which of `HEAVY` the process has loaded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.edge_client.data import Dataset
from fedmpq.edge_client.local_round import run_local_round
from fedmpq.edge_client.native_engine import NativeEngine
from fedmpq.model.exchange import Assignment, TrainingPlan, pack_layers
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, QuantizedLayer, Side

HEAVY = ("torch", "torchvision", "onnx", "onnxruntime")

Arrays = dict[str, NDArray[Any]]
save_arrays: Any = np.savez  # whose stub takes every keyword for its one flag


def save(path: Path, graph: Graph, layers: Layers, side: Side, plan: TrainingPlan, data: Dataset) -> None:
    arrays: Arrays = {
        "graph": np.frombuffer(graph.to_bytes(), np.uint8),
        "plan": np.frombuffer(json.dumps(asdict(plan)).encode(), np.uint8),
        "images": data.images,
        "labels": data.labels,
    }
    for name, layer in layers.items():
        arrays |= {f"codes/{name}": layer.codes, f"step/{name}": layer.step}
        arrays[f"bits/{name}"] = np.array(layer.bits)
    save_arrays(path, **arrays, **{f"side/{name}": tensor for name, tensor in side.items()})


def run(path: Path, threads: int) -> Arrays:
    """What the round ends with: every layer's planes, every side tensor, the loss."""
    with np.load(path) as stored:
        arrays = dict(stored)
    graph = Graph.from_bytes(arrays["graph"].tobytes())
    layers = {
        name: QuantizedLayer(codes, int(arrays[f"bits/{name}"]), arrays[f"step/{name}"])
        for name, codes in _part(arrays, "codes").items()
    }
    plan = TrainingPlan(**json.loads(arrays["plan"].tobytes()))
    classes = tuple(map(str, range(graph.shapes[graph.output][0])))
    assignment = Assignment(1, 2, 3, pack_layers(layers), _part(arrays, "side"), plan)
    data = Dataset(arrays["images"], arrays["labels"], classes)
    update = run_local_round(NativeEngine(threads), graph, assignment, data)
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
    save_arrays(result, **run(Path(source), int(threads)))
    loaded = [name for name in HEAVY if name in sys.modules]
    print(json.dumps({"isa": kernels.isa(), "peak_mb": peak_mb(), "heavy": loaded}))


if __name__ == "__main__":
    main()
