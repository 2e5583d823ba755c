"""What a simulation has gathered for its next merge, in a round or as boards were ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedmpq.method.history import ClientFacts
from fedmpq.method.state import ClientRecord, GlobalModel


@dataclass(frozen=True)
class Flight:
    """A board that is at work."""

    client: int
    version: int
    """Of the model it was sent."""
    began: int
    """When it asked for work, in microseconds of the virtual clock."""


@dataclass(frozen=True)
class Flights:
    """Where an asynchronous run stands after a merge."""

    now: int = 0
    turns: int = 0
    """How many boards were ever given work; the next one is drawn by this number."""
    open: tuple[Flight, ...] = ()
    versions: Mapping[int, GlobalModel] = field(default_factory=dict)
    """The models that boards at work were sent, with the bit-widths of those boards."""


@dataclass(frozen=True)
class Gathered:
    """Changes that are about to be merged."""

    clients: Sequence[ClientRecord]
    """Those whose changes they are, each once, in the order of their numbers."""
    parts: tuple[ClientFacts, ...]
    """What each was sent and gave back; also of those whose change was dropped."""
    losses: Sequence[tuple[float, int]]
    """The training loss of each change, and the samples of its client."""
    merge: Callable[[], GlobalModel]


class Source(Protocol):
    """What gathers changes, one merge after the other."""

    @property
    def now(self) -> int:
        """Microseconds of the virtual clock since the run began; 0 where there is none."""

    def gather(self, model: GlobalModel, tell: Callable[[int, int], None]) -> Gathered:
        """The changes that the model's next merge is made of. `tell` hears how many there are so far, and how
        many there will be."""

    def flights(self) -> Flights | None:
        """What is on its way after a merge; None: nothing ever is."""
