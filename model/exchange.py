"""What server and client hand each other in a round; neither side imports the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, PackedLayer, Side

UpdateRule = Literal["paper", "rounded"]


class PlanError(ValueError):
    """A training setting outside its range."""


@dataclass(frozen=True)
class TrainingPlan:
    """How a client trains in one round; sent with the assignment."""

    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 0.1
    momentum: float = 0.9
    momentum_bits: int = 32
    """How the momentum of the codes is kept: 0 not at all, 8 in blocks with a shared scale, 32 in float."""
    weight_decay: float = 5e-4
    update: UpdateRule = "paper"
    code_learning_rate: float = 0.01
    """`eta_eff` of the "rounded" rule; the "paper" rule has its own, much smaller, effective rate."""
    lasso: float = 0.01
    prune_density: float | None = 0.03
    """Prune the top magnitude plane when at most this share of it is set; None never prunes."""
    pad: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.update not in get_args(UpdateRule):
            raise PlanError(f"update = {self.update!r} is none of {', '.join(get_args(UpdateRule))}")
        for name, least in (("epochs", 1), ("batch_size", 2), ("pad", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"{name} = {getattr(self, name)} is too small; the least is {least}")
        for name in ("learning_rate", "code_learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlanError(f"{name} = {getattr(self, name)} must be positive and finite")
        for name, high in (("momentum", 1.0), ("weight_decay", 1.0), ("lasso", float("inf"))):
            if not 0 <= getattr(self, name) < high:
                raise PlanError(f"{name} = {getattr(self, name)} is outside 0 <= {name} < {high}")
        if self.momentum_bits not in (0, 8, 32):
            raise PlanError(f"momentum_bits = {self.momentum_bits} is none of 0, 8, 32")
        if self.prune_density is not None and not 0 <= self.prune_density <= 1:
            raise PlanError(f"prune_density = {self.prune_density} is outside 0..1")


@dataclass(frozen=True)
class Assignment:
    """What one client gets for one round."""

    seed: int
    round: int
    client: int
    layers: Mapping[str, PackedLayer]
    side: Side
    plan: TrainingPlan

    @property
    def nbytes(self) -> int:
        return payload_bytes(self.layers, self.side)


@dataclass(frozen=True)
class Update:
    """What one client gives back."""

    round: int
    client: int
    samples: int
    layers: Mapping[str, PackedLayer]
    side: Side
    loss: float
    """Mean training loss of the last local epoch."""
    accuracy: float
    """Training accuracy of the last local epoch."""

    @property
    def nbytes(self) -> int:
        return payload_bytes(self.layers, self.side)


def payload_bytes(layers: Mapping[str, PackedLayer], side: Side) -> int:
    """Bytes of the planes, steps and side tensors."""
    return sum(layer.nbytes for layer in layers.values()) + sum(tensor.nbytes for tensor in side.values())


def bit_widths(graph: Graph, layers: Mapping[str, PackedLayer]) -> tuple[int, ...]:
    """The bit-widths in the order of the graph's layers."""
    return tuple(layers[node.name].bits for node in graph.layers)


def pack_layers(layers: Layers) -> dict[str, PackedLayer]:
    return {name: layer.pack() for name, layer in layers.items()}


def unpack_layers(graph: Graph, packed: Mapping[str, PackedLayer]) -> Layers:
    """The codes of the planes; planes that do not fit the graph are an error that names the layer."""
    layers: Layers = {}
    for name, layer in packed.items():
        shape = graph.weight_shape(name)
        try:
            layers[name] = layer.unpack(shape)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    return layers
