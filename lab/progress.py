"""A simulation as it goes: a bar on a terminal or in a notebook, and what is to be done with each round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedmpq.lab import simulation
from fedmpq.lab.round_log import RoundResult

TRAINING_SHARE = 0.9
"""Of a round's time, roughly: the rest is merging, calibration and evaluation."""


@contextmanager
def watched(console: Console, on_round: Callable[[RoundResult], None]) -> Iterator[simulation.Listener]:
    """A listener for `simulation.run` that moves a bar and hands over every round's result."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("starting workers", total=None)

        def listen(progress: simulation.Progress) -> None:
            done = float(progress.round)
            if progress.result is None:
                done += TRAINING_SHARE * progress.done / progress.selected - 1
            what = f"round {progress.round}/{progress.rounds}, {progress.done}/{progress.selected} clients"
            bar.update(task, description=what, completed=done, total=progress.rounds)
            if progress.result is not None:
                on_round(progress.result)

        yield listen
