"""What a simulation evaluates after a round: the global model, and each integer model that devices run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedmpq.exchange.messages import pack_layers
from fedmpq.method.protocol import Method
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.quantized import PackedLayer, Side, Weights

Sent = TypeVar("Sent")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class FullProbe:
    """The global model `W` in full precision, or its moving average."""

    weights: Weights
    side: Side
    clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class IntegerProbe:
    """What the devices of some clients run."""

    layers: Mapping[str, PackedLayer]
    side: Side
    clients: tuple[int, ...]


Probe = FullProbe | IntegerProbe


def probes_of(
    method: Method[Sent, Returned], model: GlobalModel, clients: Iterable[ClientRecord]
) -> list[Probe]:
    """`W` first, then each distinct deployment of these clients."""
    final = model.final
    return [
        FullProbe(final.weights, final.side),
        *(
            IntegerProbe(pack_layers(each.layers), each.side, tuple(client.client for client in each.clients))
            for each in method.deployments(model, clients)
        ),
    ]
