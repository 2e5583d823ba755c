"""What server and client hand each other where clients train in full precision: FP32, FedPAQ and UVeQFed.

What goes back is the change of the weights, compressed; side tensors go as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange import fedpaq, uveqfed
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.randomness import Draws, Purpose

Compression = Literal["none", "fedpaq", "uveqfed"]


@dataclass(frozen=True)
class FloatAssignment:
    """The whole model in full precision, to train or to measure the statistics of."""

    seed: int
    round: int
    client: int
    budget: float
    weights: Weights
    side: Side
    plan: TrainingPlan
    compression: Compression

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weights) + _nbytes(self.side)

    @property
    def draws(self) -> Draws:
        """The randomness of this client in this round, which both sides know."""
        return Draws(self.seed, self.client, self.round)


class Changes(Protocol):
    """The changes of all layers as they are sent."""

    @property
    def nbytes(self) -> int: ...
    def decoded(self, draws: Draws) -> Weights:
        """What the server takes them for; `draws` are those of the client's assignment."""


@dataclass(frozen=True)
class FloatUpdate:
    """What one client gives back."""

    round: int
    client: int
    samples: int
    changes: Changes
    side: Side
    loss: float
    """Mean training loss of the last local epoch."""

    @property
    def nbytes(self) -> int:
        return self.changes.nbytes + _nbytes(self.side)


def compress(compression: Compression, changes: Weights, budget: float, draws: Draws) -> Changes:
    """The changes as a method with this compression sends them, with `budget` bits a weight."""
    if compression == "fedpaq":
        return FedPAQChanges.of(changes, budget, draws)
    if compression == "uveqfed":
        return UVeQFedChanges.of(changes, budget, draws)
    return ExactChanges(changes)


@dataclass(frozen=True)
class ExactChanges:
    """FP32: the changes themselves."""

    changes: Weights

    @property
    def nbytes(self) -> int:
        return _nbytes(self.changes)

    def decoded(self, draws: Draws) -> Weights:
        return self.changes


@dataclass(frozen=True)
class FedPAQChanges:
    """FedPAQ: unbiased stochastic levels of each layer; a weight takes whole bits: a budget of 2.5 is 2."""

    payloads: Mapping[str, fedpaq.FedPAQPayload]

    @classmethod
    def of(cls, changes: Weights, budget: float, draws: Draws) -> FedPAQChanges:
        return cls(
            {
                name: fedpaq.encode(
                    change, int(budget), draws.uniform(change.size, Purpose.UPLOAD, layer=layer)
                )
                for layer, (name, change) in enumerate(changes.items())
            }
        )

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads.values())

    def decoded(self, draws: Draws) -> Weights:
        return {name: fedpaq.decode(payload) for name, payload in self.payloads.items()}


@dataclass(frozen=True)
class UVeQFedChanges:
    """UVeQFed: the whole change on one dithered hexagonal lattice; both sides draw the same dither."""

    payload: uveqfed.UVeQFedPayload
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, changes: Weights, budget: float, draws: Draws) -> UVeQFedChanges:
        flat = np.concatenate([change.ravel() for change in changes.values()])
        payload = uveqfed.encode(flat, budget, _dither(flat.size, draws))
        return cls(payload, {name: change.shape for name, change in changes.items()})

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    def decoded(self, draws: Draws) -> Weights:
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        flat = uveqfed.decode(self.payload, _dither(sum(sizes), draws))
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return {
            name: part.reshape(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def _dither(weights: int, draws: Draws) -> NDArray[np.float32]:
    return draws.uniform(uveqfed.uniforms_needed(weights), Purpose.UPLOAD)


def _nbytes(tensors: Mapping[str, NDArray[np.float32]]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
