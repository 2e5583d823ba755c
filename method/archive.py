"""A global model's tensors in an .npz archive, nothing pickled: `weights/NAME` and `side/NAME`, and of the
moving average, where there is one, `average-weights/NAME` and `average-side/NAME`.

The same model gives the same bytes, so their hash is its name.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from fedmpq.method.state import Average, ClientRecord, GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights


class ArchiveError(ValueError):
    """Arrays or bytes that are not a model of the graph."""


@dataclass(frozen=True)
class Tensors:
    """All tensors of a global model."""

    weights: Weights
    side: Side
    average: Average | None = None

    @classmethod
    def of(cls, model: GlobalModel) -> Tensors:
        return cls(model.weights, model.side, model.average)

    @classmethod
    def from_arrays(cls, graph: Graph, arrays: Mapping[str, Any]) -> Tensors:
        """Those of the graph, from `to_arrays`' names; other names are left to others."""
        groups: dict[str, dict[str, Any]] = {}
        for key, array in arrays.items():
            kind, slash, name = key.partition("/")
            if slash:
                groups.setdefault(kind, {})[name] = array
        layers = {node.name: graph.weight_shape(node.name) for node in graph.layers}
        shapes = {"weights": layers, "side": graph.side_shapes()}
        if "average-weights" in groups or "average-side" in groups:
            shapes |= {f"average-{kind}": expected for kind, expected in shapes.items()}
        for kind, expected in shapes.items():
            _check(kind, groups.get(kind, {}), expected)
        found = [{name: groups[kind][name] for name in expected} for kind, expected in shapes.items()]
        return cls(found[0], found[1], Average(found[2], found[3]) if len(found) > 2 else None)

    def to_arrays(self) -> dict[str, Any]:
        groups = {"weights": self.weights, "side": self.side}
        if self.average is not None:
            groups |= {"average-weights": self.average.weights, "average-side": self.average.side}
        return {f"{kind}/{name}": tensor for kind, group in groups.items() for name, tensor in group.items()}

    def after(
        self, round_number: int, bit_widths: tuple[int, ...], clients: tuple[ClientRecord, ...]
    ) -> GlobalModel:
        """The global model that these are the tensors of."""
        return GlobalModel(round_number, self.weights, self.side, bit_widths, clients, self.average)


def pack_model(tensors: Tensors) -> bytes:
    file = io.BytesIO()
    np.savez(file, **tensors.to_arrays())
    return file.getvalue()


def unpack_model(graph: Graph, data: bytes) -> Tensors:
    """The tensors of a packed model; ArchiveError for any other bytes."""
    return Tensors.from_arrays(graph, read_arrays(io.BytesIO(data), f"the model of {len(data)} bytes"))


def read_arrays(file: IO[bytes], what: str) -> dict[str, Any]:
    """All arrays of an .npz archive; ArchiveError, which calls it `what`, where it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    # A damaged archive makes zipfile and NumPy raise nearly anything.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArchiveError(
            f"{what} is damaged or no .npz archive ({reason}): bring back a copy of it"
        ) from None
    if strange := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise ArchiveError(f"{what} is damaged: {strange[0][:80]!r} is no array; bring back a copy of it")
    return found


def _check(kind: str, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(tensors.keys() ^ shapes.keys()):
        raise ArchiveError(f"{kind}/{name} is {'missing' if name in shapes else 'not in the graph'}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name] or tensor.dtype != np.float32:
            raise ArchiveError(f"{kind}/{name} is {tensor.dtype} {tensor.shape}, not float32 {shapes[name]}")
