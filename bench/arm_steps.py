"""Instructions of a training step on emulated ARM boards, by portable code and by the board's own set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tools.arm_instructions import counted_steps


@dataclass(frozen=True)
class Ratio:
    """Millions of instructions in the library."""

    scalar: float
    own: float

    @property
    def library(self) -> float:
        """Portable code's over the own set's."""
        return self.scalar / self.own


def measure(model: str, batch: int, cpus: Iterable[str]) -> dict[str, Ratio]:
    """Of one step; `tools.arm_board.BoardError` where there is no emulator."""
    counted = counted_steps(model, batch, cpus)
    return {cpu: Ratio(scalar.total() / 1e6, own.total() / 1e6) for cpu, scalar, own in counted}
