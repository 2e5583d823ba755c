"""What a board gives to a round, and the refusal of a round that would take more.

A round is refused before its model is downloaded or anything is allocated for it. How long it will take is
known only in part by then: what no processor could do in the time is refused at once, and a training whose
pace shows that it will not be done is given up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fedmpq.edge_client.board_data import BoardData
from fedmpq.exchange.messages import Phase, TrainingPlan
from fedmpq.model.graph import Graph
from fedmpq.system.memory import memory_given, size_text
from fedmpq.training.needs import Needs, round_needs

PRODUCTS_PER_SECOND = 500_000_000_000
"""More products of 8-bit codes than any core computes in a second."""
PROCESS_BYTES = 64 << 20
"""Of the interpreter and its libraries."""
DEFAULT_SECONDS = 86400.0


class CannotTakePart(Exception):
    """This board does not do a round that it was asked for; the message says why and what would help."""


@dataclass(frozen=True)
class Limits:
    """What a round may take here. The memory that is given is that of the whole process."""

    seconds: float = DEFAULT_SECONDS

    def check(
        self,
        graph: Graph,
        plan: TrainingPlan,
        phase: Phase,
        data: BoardData,
        *,
        evaluated: int,
        batch: int,
        threads: int,
    ) -> None:
        """Refuse a round that needs more memory or time; `evaluated` images are measured before training."""
        samples = len(data.train)
        needs = round_needs(graph, plan, phase, samples, evaluated, batch, threads)
        self._check_memory(graph, plan, needs, data)
        seconds = needs.products / (PRODUCTS_PER_SECOND * threads)
        if seconds > self.seconds:
            raise CannotTakePart(
                f"{graph.name!r} needs {needs.products:.2g} products for {samples} images and {plan.epochs} "
                f"epochs, over {seconds:.0f} s on any processor of {threads} cores, and this board gives a "
                f"round {self.seconds:g}: lower epochs, or start the board with a higher --max-seconds"
            )

    def _check_memory(self, graph: Graph, plan: TrainingPlan, needs: Needs, data: BoardData) -> None:
        held = sum(
            part.images.nbytes + (0 if part.targets is None else part.targets.nbytes)
            for part in (data.train, data.evaluation)
        )
        memory, given = PROCESS_BYTES + held + needs.memory, memory_given()
        if memory > given:
            raise CannotTakePart(
                f"{graph.name!r} with a batch of {min(plan.batch_size, len(data.train))} needs about "
                f"{size_text(memory)} of memory here, {size_text(held)} of it for images, and this "
                f"board gives {size_text(given)}: lower batch_size, or start the board with a higher "
                "--max-memory"
            )


class Pace:
    """Watches a training of so many batches; given up when it will clearly not be done in time."""

    def __init__(self, batches: int, seconds: float) -> None:
        self._batches, self._seconds = batches, seconds
        self._start = time.monotonic()
        self._done = 0

    def batch_begins(self) -> None:
        """Raises CannotTakePart when the time is over, or when a tenth of it, or ten minutes, show that it
        will not do."""
        passed = time.monotonic() - self._start
        expected = passed / self._done * self._batches if self._done else 0.0
        if passed > self._seconds or (
            passed > min(self._seconds / 10, 600.0) and expected > 1.5 * self._seconds
        ):
            raise CannotTakePart(
                f"{self._done} of {self._batches} batches took {passed:.1f} s, and this board gives a round "
                f"{self._seconds:g}: lower epochs, or start the board with a higher --max-seconds"
            )
        self._done += 1
