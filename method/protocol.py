"""The seam between a federated method and whatever runs it: a server with real boards, or a simulation.

A method is pure: the same global model and the same answers give the same next model, to the bit. So a run
goes on after a crash as if there had been none, and a simulation shows what a federation does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.method.state import ClientRecord, Deployment, GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights

Sent = TypeVar("Sent", covariant=True)
Returned = TypeVar("Returned", contravariant=True)


class Method(Protocol[Sent, Returned]):
    """A method whose clients are sent `Sent` and give back `Returned`."""

    @property
    def graph(self) -> Graph: ...

    def start(self, weights: Weights, side: Side, clients: Sequence[ClientRecord]) -> GlobalModel:
        """The model before the first round."""

    def assign(self, model: GlobalModel, client: ClientRecord) -> Sent:
        """What the client is sent to train in round `model.round + 1`."""

    def merge(self, model: GlobalModel, updates: Iterable[Returned]) -> GlobalModel:
        """The next global model. Updates come in ascending order of their clients, each once, and need not
        all be held in memory at a time."""

    @property
    def calibrates(self) -> bool:
        """Whether clients measure BatchNorm's statistics of what is handed out."""

    def calibration(self, model: GlobalModel, client: ClientRecord) -> Sent:
        """What the client's device would run after `model.round` rounds, for it to measure."""

    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel:
        """The model with the statistics that clients measured, which come in order of their clients."""

    def deployments(self, model: GlobalModel, clients: Iterable[ClientRecord]) -> list[Deployment]:
        """The integer models that the clients' devices run, each distinct one once; a method that trains in
        full precision has none, and devices run `model.final` itself."""


class IntegerMethod(Method[Assignment, Update], Protocol):
    """A method that boards can train: codes go out, codes or their changes come back."""
