"""The work of a round that is open in the store."""

from __future__ import annotations

from collections.abc import Sequence

from fedmpq.server.active_run import ActiveRun
from fedmpq.server.buffered_work import BufferedWork
from fedmpq.server.calibration_work import CalibrationWork
from fedmpq.server.round_work import RoundWork, TrainingWork
from fedmpq.server.store.records import Round, TrainingRound


def training_work(active: ActiveRun) -> type[TrainingWork]:
    """How the run trains: in rounds, or without."""
    return TrainingWork if active.config.asynchronous is None else BufferedWork


def work_of(active: ActiveRun, stored: Round, slowest: Sequence[float]) -> RoundWork:
    """`slowest` are the seconds of the last rounds' slowest answers."""
    if isinstance(stored, TrainingRound):
        return training_work(active)(active, active.model, stored.target, slowest)
    return CalibrationWork(active, stored.trained)
