"""Instructions of a training step on emulated ARM boards, by portable code and by the board's own set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fedmpq.exchange.messages import TrainingPlan
from tools import arm_board, rounds
from tools.arm_instructions import OWN_ISA, Counting, Counts, convolutions

IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Ratio:
    """Millions of instructions."""

    scalar: float
    own: float
    convolutions: float
    """Portable code's over the own set's."""

    @property
    def library(self) -> float:
        """The same of all that the library does."""
        return self.scalar / self.own


def measure(model: str, batch: int, cpus: tuple[str, ...]) -> dict[str, Ratio]:
    """Of one step; `tools.arm_board.BoardError` where there is no emulator."""
    with TemporaryDirectory() as scratch:
        counting = Counting(arm_board.make(), Path(scratch))
        source = Path(scratch) / "round.npz"
        rounds.make(source, model, IMAGE, batch, TrainingPlan(epochs=1, batch_size=batch))
        return {
            cpu: _ratio(counting.step(source, cpu, "scalar"), counting.step(source, cpu, OWN_ISA[cpu]))
            for cpu in cpus
        }


def _ratio(scalar: Counts, own: Counts) -> Ratio:
    return Ratio(scalar.total() / 1e6, own.total() / 1e6, convolutions(scalar) / convolutions(own))
