"""A global model as bytes: an .npz archive of `weights/NAME` and `side/NAME`, nothing pickled.

The same model gives the same bytes, so its hash is its name.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights


class ArchiveError(ValueError):
    """Bytes that are not a model of the graph."""


def pack_model(weights: Weights, side: Side) -> bytes:
    arrays: dict[str, Any] = {f"weights/{name}": tensor for name, tensor in weights.items()}
    arrays |= {f"side/{name}": tensor for name, tensor in side.items()}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_model(graph: Graph, data: bytes) -> tuple[Weights, Side]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    shapes = {f"weights/{node.name}": graph.weight_shape(node.name) for node in graph.layers}
    shapes |= {f"side/{name}": shape for name, shape in graph.side_shapes().items()}
    for name in sorted(shapes.keys() | arrays.keys()):
        if name not in arrays or name not in shapes or arrays[name].shape != shapes[name]:
            raise ArchiveError(f"{name} of the stored model is not that of graph {graph.name!r}")
    weights = {node.name: arrays[f"weights/{node.name}"] for node in graph.layers}
    return weights, {name: arrays[f"side/{name}"] for name in graph.side_shapes()}
