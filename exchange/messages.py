"""What server and client hand each other in a round; neither side imports the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, PackedLayer, Side

UpdateRule = Literal["paper", "carried"]
Phase = Literal["training", "calibration"]
"""What a client does in a round: train the model, or measure the statistics of what came of it."""


class PlanError(ValueError):
    """A training setting outside its range."""


_RANGES = (("epochs", 1, 1_000_000), ("batch_size", 2, 1 << 20), ("pad", 0, 4096))
"""No setting of sense is beyond these; what a board can do, it knows itself."""


MAX_ADJUSTMENT = 4.0
"""1 is all that a class's frequency explains; far beyond, frequent classes would never be learnt."""


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
    code_learning_rate: float = 0.1
    """`eta_eff` of the "carried" rule; the "paper" rule has its own, much smaller, effective rate."""
    lasso: float = 0.01
    prune_density: float | None = 0.03
    """Prune the top magnitude plane when at most this share of it is set; None never prunes."""
    logit_adjustment: float = 0.0
    """`tau`: how much of the client's own frequencies of classes its loss is told (training.label_prior)."""
    pad: int = 0
    flip: bool = False
    side_bits: int = 16
    """16: side tensors cross the network in half precision where `rounded_side` finds it safe; 32: never."""

    def __post_init__(self) -> None:
        if self.update not in get_args(UpdateRule):
            raise PlanError(f"update = {self.update!r} is none of {', '.join(get_args(UpdateRule))}")
        self._check_counts()
        for name in ("learning_rate", "code_learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlanError(f"{name} = {getattr(self, name)} must be positive and finite")
        for name, high in (("momentum", 1.0), ("weight_decay", 1.0), ("lasso", float("inf"))):
            if not 0 <= getattr(self, name) < high:
                raise PlanError(f"{name} = {getattr(self, name)} is outside 0 <= {name} < {high}")
        if not 0 <= self.logit_adjustment <= MAX_ADJUSTMENT:
            raise PlanError(
                f"logit_adjustment = {self.logit_adjustment} is outside 0..{MAX_ADJUSTMENT:g}; 0 is none"
            )
        for name, known in (("momentum_bits", (0, 8, 32)), ("side_bits", (16, 32))):
            if getattr(self, name) not in known:
                raise PlanError(f"{name} = {getattr(self, name)} is none of {', '.join(map(str, known))}")
        self._check_prune_density()

    def _check_counts(self) -> None:
        for name, least, most in _RANGES:
            if getattr(self, name) < least:
                raise PlanError(f"{name} = {getattr(self, name)} is too small; the least is {least}")
            if getattr(self, name) > most:
                raise PlanError(f"{name} = {getattr(self, name)} is too large; the most is {most}")

    def _check_prune_density(self) -> None:
        if self.prune_density is not None and not 0 <= self.prune_density <= 1:
            raise PlanError(f"prune_density = {self.prune_density} is outside 0..1")


@dataclass(frozen=True)
class Assignment:
    """What one client gets for one round: a model to train, or to measure the statistics of."""

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
class Evaluation:
    """How the model a client was sent does on the client's own data."""

    samples: int
    correct: int
    score: float | None = None
    """The metric of another task than classification, see `model.metrics`."""

    @property
    def value(self) -> float:
        """The task's metric: the share of right classes, or the score."""
        return self.correct / max(1, self.samples) if self.score is None else self.score


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
    """The share of right classes or labels in the last local epoch; 0 where answers are values."""
    evaluation: Evaluation | None = None

    @property
    def nbytes(self) -> int:
        return payload_bytes(self.layers, self.side)


@dataclass(frozen=True)
class Calibration:
    """BatchNorm statistics that one client has measured of the model it was sent (see model.calibration)."""

    round: int
    """Rounds of training that the model has behind it."""
    client: int
    samples: int
    """The client's, by which its statistics count; it need not have measured all of them."""
    statistics: Side
    evaluation: Evaluation | None = None
    """Of the model with these statistics."""

    @property
    def nbytes(self) -> int:
        return payload_bytes({}, self.statistics)


def payload_bytes(layers: Mapping[str, PackedLayer], side: Side) -> int:
    """Bytes of the planes, steps and side tensors as they are sent."""
    halves = that_fit_half(side)
    tensors = sum(tensor.nbytes // 2 if name in halves else tensor.nbytes for name, tensor in side.items())
    return sum(layer.nbytes for layer in layers.values()) + tensors


_HALF = np.finfo(np.float16)


def that_fit_half(side: Side) -> set[str]:
    """The names of the tensors of which half precision holds every value exactly.

    Tensors are many and small: one pass over all of them takes as long as over one.
    """
    filled = {name: tensor.reshape(-1) for name, tensor in side.items() if tensor.size}
    found = side.keys() - filled.keys()
    if filled:
        joined = np.concatenate(list(filled.values()))
        starts = np.cumsum([0, *(tensor.size for tensor in filled.values())])[:-1]
        with np.errstate(over="ignore"):
            exact = joined.astype(np.float16).astype(np.float32) == joined
        fits = np.logical_and.reduceat(exact, starts).tolist()
        found |= {name for name, fit in zip(filled, fits, strict=True) if fit}
    return found


def rounded_side(side: Side, bits: int) -> Side:
    """The side tensors as a method sends them: with `bits` 16, to the nearest half-precision values.

    A tensor keeps its single precision where half would harm it: clips (one number each, and a scale of all
    codes), values beyond 65504, and variances below 2^-14, of which the square root is divided by.
    """
    if bits == 32:
        return side
    return {
        name: tensor.astype(np.float16).astype(np.float32) if _safe_in_half(name, tensor) else tensor
        for name, tensor in side.items()
    }


def _safe_in_half(name: str, tensor: NDArray[np.float32]) -> bool:
    if tensor.ndim == 0 or not np.isfinite(tensor).all() or np.abs(tensor).max(initial=0) > _HALF.max:
        return False
    return not name.endswith(".running_var") or bool(((tensor == 0) | (tensor >= _HALF.tiny)).all())


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
