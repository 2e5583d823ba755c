"""`--track`: the rounds of a simulation for TensorBoard or MLflow as they are made.

A tracker that fails on the way costs its rounds, not the simulation; `fedmpq track` writes them later.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fedmpq.lab.round_log import RoundResult
from fedmpq.method.tracking import Tracker, TrackingError, open_tracker

Say = Callable[[str], None]
Track = Callable[[RoundResult], None]


@contextmanager
def tracking(target: str | None, folder: Path, done: int, say: Say) -> Iterator[Track]:
    """Takes each round's result; `done` rounds of the run in `folder` were made before. None: nowhere."""
    if target is None:
        yield lambda result: None
        return
    run = folder.resolve().name
    with closing(open_tracker(target, run)) as tracker:
        if tracker.last > done:
            raise TrackingError(
                f"{target} has {tracker.last} rounds of an earlier run {run!r}: choose another --out, or "
                "delete them there"
            )
        yield _Tracked(tracker, target, folder, say)


class _Tracked:
    def __init__(self, tracker: Tracker, target: str, folder: Path, say: Say) -> None:
        self._tracker: Tracker | None = tracker
        self._target, self._folder, self._say = target, folder, say

    def __call__(self, result: RoundResult) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.add(result.facts())
        # Whatever a tracker's client raises: it is not worth a run.
        except Exception as error:
            self._tracker = None
            words = shlex.join(["fedmpq", "track", str(self._folder), "--to", self._target])
            self._say(f"{self._target} fails ({error}); the run goes on, and later: {words}")
