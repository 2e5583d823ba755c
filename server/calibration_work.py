"""Calibration: the clients of a round measure the statistics of the model that it made."""

from __future__ import annotations

from collections.abc import Iterator

from fedmpq.exchange.messages import Calibration, Evaluation
from fedmpq.exchange.wire import decode_calibration
from fedmpq.method.evaluation import reported_accuracies
from fedmpq.method.state import GlobalModel
from fedmpq.server.active_run import MAX_STRIKES, ActiveRun
from fedmpq.server.blobs import Outgoing
from fedmpq.server.checked_model import Keep, kept_if_usable, not_kept
from fedmpq.server.round_facts import PHASE_SECONDS, Measured, time_facts, traffic
from fedmpq.server.round_time import Timing
from fedmpq.server.round_work import RoundWork, undealt
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import CalibrationCommit, Commit, OpenedRound, Run, Seat, TrainingRound
from fedmpq.server.stored_updates import Answers
from fedmpq.server.validation import check_calibration
from fedmpq.system.stopwatch import Stopwatch

AWAY_SECONDS = 60.0
"""A calibration that has statistics of others waits no longer for boards that are not connected."""


class CalibrationWork(RoundWork):
    """Clients measure the statistics of what the last round made, as their devices would run it."""

    phase = "calibration"
    activity = "measuring"
    answer_name = "calibration"
    merged_words = "round calibrated"

    def __init__(self, active: ActiveRun, trained: TrainingRound) -> None:
        super().__init__(active, active.model.final, active.model.round)
        self._trained = trained

    def deal_to_all(self, outgoing: Outgoing) -> tuple[Seat, ...]:
        """To those that have just trained, being at hand; at the end of the run to everybody, whoever may be
        reached by then."""
        active = self.active
        if active.model.round >= active.config.rounds:
            chosen = {member.client for member in active.members.values() if member.strikes < MAX_STRIKES}
        else:
            chosen = {seat.client for seat in self._trained.seats_in("updated")}
        return self.deal([record for record in active.model.clients if record.client in chosen], outgoing)

    @property
    def seconds(self) -> float:
        return self.active.config.calibration_seconds

    @property
    def needed(self) -> int:
        return 1

    @property
    def grace(self) -> float:
        return min(AWAY_SECONDS, self.active.config.away_seconds)

    @property
    def closes_early(self) -> bool:
        return False

    def replacements(self, *, missing: int, available: int) -> int:
        # Statistics cost little: whoever is here is asked, beside those who may yet answer.
        return available

    def progress(self, answered: int, seats: int) -> str:
        return f"{answered} of statistics of {seats}"

    @property
    def evaluates(self) -> bool:
        return self.active.config.test_data is None

    def check(self, name: bytes, data: bytes, seat: Seat, max_samples: int) -> None:
        check_calibration(self.active.graph, data, self.expected(seat, max_samples))

    def hold(self, name: bytes, data: bytes) -> None:
        # Statistics are short, and read when they are merged.
        pass

    def commit(self, store: Store, commit: Commit, now: float) -> Run:
        assert isinstance(commit, CalibrationCommit)
        return store.commit_calibration(self.address.run_id, commit, now)

    def attempt(
        self, closed: OpenedRound, timing: Timing, keep: Keep = not_kept
    ) -> tuple[GlobalModel, CalibrationCommit]:
        """The model with the statistics that clients measured, and the facts to commit."""
        clock = Stopwatch()
        active, answers = self.active, closed.answers()
        told: dict[int, Evaluation | None] = {}
        found = self._calibrations(answers, told)
        model = undealt(active.method.calibrated(self._dealt_model(answers), found))
        clock.end("calibrating")
        name = kept_if_usable(active.method, model, keep)
        measured = self._measured_here(model)
        if active.config.test_data is None:
            measured = Measured(reported_accuracies(told), "clients")
        facts = dict(self._trained.metrics) | (self._facts(model, measured) if measured.accuracies else {})
        clock.end("measuring")
        bytes_up, bytes_down = traffic(closed)
        metrics = facts | {
            "calibrated_on": "clients",
            "calibrated_by": len(answers),
            "rejected": facts.get("rejected", 0) + len(closed.seats_in("rejected")),
            **time_facts(facts.get(PHASE_SECONDS, {}), clock.seconds, {"calibrating": timing.elapsed}),
            "bytes_up": facts.get("bytes_up", 0) + sum(bytes_up.values()),
            "bytes_down": facts.get("bytes_down", 0) + sum(bytes_down.values()),
        }
        return model, CalibrationCommit(
            round=model.round,
            last=model.round >= active.config.rounds,
            model=name,
            accuracies=measured.accuracies,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            metrics=metrics,
            keep_models=active.config.keep_models,
        )

    def _calibrations(self, answers: Answers, told: dict[int, Evaluation | None]) -> Iterator[Calibration]:
        """Read one after the other; what each client has measured is noted in `told`."""
        for _, answer in answers:
            _, found = decode_calibration(self.active.graph, self.active.blobs.read(answer.payload))
            told[found.client] = found.evaluation
            yield found
