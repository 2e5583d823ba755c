"""What the server knows between rounds. Nothing else is needed to go on, and nothing here is random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedmpq.model.quantized import Layers, Side, Weights


@dataclass(frozen=True)
class ClientRecord:
    """One client as the server sees it."""

    client: int
    budget: float
    samples: int
    dealt: tuple[int, ...] | None = None
    """Bit-widths of its last round as sent; None before its first."""
    returned: tuple[int, ...] | None = None
    """Bit-widths of its last round as given back, after pruning."""

    def growth(self, layers: int) -> tuple[int, ...]:
        """`delta b = returned - dealt`, zero before the first round."""
        if self.dealt is None or self.returned is None:
            return (0,) * layers
        return tuple(after - before for before, after in zip(self.dealt, self.returned, strict=True))


@dataclass(frozen=True)
class Average:
    """A moving average of the global model over its rounds."""

    weights: Weights
    side: Side


@dataclass(frozen=True)
class GlobalModel:
    """The global model after `round` rounds."""

    round: int
    weights: Weights
    side: Side
    bit_widths: tuple[int, ...]
    """The averaged bit-widths from which the next round's deal starts."""
    clients: tuple[ClientRecord, ...]
    average: Average | None = None
    """None where the method keeps none, and before the first round."""
    dealt: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Bit-widths by client, of those who were sent this model, where that is on record, as on a server. A
    merge goes by them; without them it deals again, which gives the same from the same records."""

    @property
    def final(self) -> GlobalModel:
        """The model to hand out: the moving average where there is one."""
        if self.average is None:
            return self
        return replace(self, weights=self.average.weights, side=self.average.side, average=None)

    def with_final_side(self, side: Side) -> GlobalModel:
        """The same with other side tensors in what is handed out. Where that is no average the next round
        starts from them too; it trains with the statistics of its own batches."""
        if self.average is None:
            return replace(self, side=side)
        return replace(self, average=replace(self.average, side=side))


@dataclass(frozen=True)
class Deployment:
    """One model that devices run, and whose they are."""

    clients: tuple[ClientRecord, ...]
    widths: tuple[int, ...]
    layers: Layers
    side: Side
