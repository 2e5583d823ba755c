"""What the clients of an open round do, and what becomes of their answers: training, and calibration.

All of it blocks, and all of it can be done again after a crash with the same result: it depends on stored
facts only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedmpq.exchange.messages import Calibration, Evaluation, Phase
from fedmpq.exchange.wire import decode_calibration
from fedmpq.method.archive import Tensors, pack_model
from fedmpq.method.evaluation import reported_accuracies
from fedmpq.method.quantized_method import select_clients
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.method.usable_model import check_usable
from fedmpq.server.active_run import MAX_STRIKES, ActiveRun, ReplayError
from fedmpq.server.blobs import Outgoing
from fedmpq.server.learned_deadline import SLOWEST, learned_seconds
from fedmpq.server.round_facts import PHASE_SECONDS, Measured, checked_facts, measured_on, time_facts, traffic
from fedmpq.server.round_time import Clock, Timing
from fedmpq.server.sent_model import SentModel
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import (
    CalibrationCommit,
    Client,
    Commit,
    Member,
    OpenedRound,
    Round,
    RoundAddress,
    Run,
    Seat,
    TrainingCommit,
    TrainingRound,
)
from fedmpq.server.stored_updates import Answers, StoredUpdates
from fedmpq.server.validation import Expected, check_calibration, check_update
from fedmpq.system.stopwatch import Stopwatch

AWAY_SECONDS = 60.0
"""A calibration that has statistics of others waits no longer for boards that are not connected."""


@dataclass(frozen=True)
class Seating:
    """Clients about to enter a round."""

    members: tuple[Member, ...]
    """Those who join the run, and those who were dealt to, as they are now."""
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Merged:
    """What a round has come to."""

    run: Run
    model: GlobalModel
    commit: Commit


class RoundWork(ABC):
    """The work of one open round, on one model."""

    phase: ClassVar[Phase]
    activity: ClassVar[str]
    """What a client does with its payload."""
    answer_name: ClassVar[str]
    """What it gives back."""
    merged_words: ClassVar[str]
    """What the log says of the round's end."""

    def __init__(self, active: ActiveRun, model: GlobalModel, number: int) -> None:
        self.active = active
        self.model = model
        """What is sent, at the bit-widths each client is dealt."""
        self.address = RoundAddress(active.run.run_id, number, self.phase)
        self._sent = SentModel(active.graph, active.method.quantizer(model))

    # Dealing

    def seat(self, connected: Sequence[Client], count: int, outgoing: Outgoing) -> Seating:
        """`count` of the connected clients, or all if they are fewer, drawn and dealt to."""
        return self._seat(self.active.as_members(connected), count, outgoing)

    def _seat(self, candidates: Sequence[Member], count: int, outgoing: Outgoing) -> Seating:
        records = [member.record for member in candidates]
        count = min(count, len(records))
        chosen = select_clients(records, self.active.config.seed, self.active.next_round, count)
        seats = self.deal(chosen, outgoing)
        seated = {seat.client for seat in seats}
        known = self.active.members
        members = [one for one in candidates if one.client_id not in known or one.client in seated]
        return Seating(tuple(members), seats)

    def deal(self, chosen: Sequence[ClientRecord], outgoing: Outgoing) -> tuple[Seat, ...]:
        """A seat for each, its payload ready to be downloaded."""
        seats: list[Seat] = []
        made: dict[tuple[int, ...], tuple[bytes, int]] = {}
        for record in chosen:
            widths = self.active.method.deal(self.model, record)
            if widths not in made:
                data = self._sent.payload(widths)
                made[widths] = outgoing.put(data), len(data)
            seats.append(Seat(record.client, widths, *made[widths]))
        return tuple(seats)

    def make_payloads_again(self, seats: Sequence[Seat], outgoing: Outgoing) -> None:
        """After a restart: whatever the round's clients may still want to download is there again."""
        for name, widths in {seat.payload: seat.bit_widths for seat in seats}.items():
            if not outgoing.holds(name) and outgoing.put(self._sent.payload(widths)) != name:
                raise ReplayError(
                    f"a payload of run {self.active.run.name!r}, round {self.address.number}, cannot be made "
                    "again: another version of fedmpq opened this round; go on with that one, or abort the "
                    "run"
                )

    # Collecting

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the round waits for its clients; 0: as long as it takes."""

    def deadline(self, now: float) -> float | None:
        return now + self.seconds if self.seconds else None

    @property
    @abstractmethod
    def needed(self) -> int:
        """Answers without which the round does not close."""

    @property
    @abstractmethod
    def grace(self) -> float:
        """Seconds that a client with a place may be disconnected before the round goes on without it."""

    @property
    @abstractmethod
    def closes_early(self) -> bool:
        """Whether a round that has the answers it needs closes without the others."""

    @abstractmethod
    def replacements(self, *, missing: int, available: int) -> int:
        """How many of the available clients are asked when the deadline passed with answers missing."""

    @abstractmethod
    def progress(self, answered: int, seats: int) -> str:
        """What the round waits for, in words."""

    # Answers

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """Whether clients measure the accuracy of what they were sent."""

    def expected(self, seat: Seat, max_samples: int) -> Expected:
        """What the seat fixes about the answer."""
        config = self.active.config
        return Expected(
            run_id=self.address.run_id,
            round=self.address.number,
            client=seat.client,
            layers=self._sent.layers(seat.bit_widths),
            side=self._sent.side(seat.bit_widths),
            max_samples=min(max_samples, config.max_samples),
            max_norm=config.max_update_norm,
            bounds=self._sent.statistics_bounds(seat.bit_widths),
            update=self.active.method.recipe.plan.update,
        )

    @abstractmethod
    def check(self, data: bytes, seat: Seat, max_samples: int) -> None:
        """Raises Rejected if that is no answer to what the seat was dealt."""

    @abstractmethod
    def finish(self, store: Store, closed: OpenedRound, timing: Timing, clock: Clock) -> Merged:
        """Merge the answers of a closed round and store what it has come to."""

    @abstractmethod
    def attempt(self, closed: OpenedRound, timing: Timing) -> tuple[GlobalModel, Commit]:
        """What the answers of a closed round come to, with nothing stored and the commit's `model` empty.

        Raises if they make no model that boards can run, or one that is too much worse than the last.
        """

    def _facts(self, model: GlobalModel, measured: Measured) -> dict[str, Any]:
        """The accuracy, unless it is too much worse."""
        active, most = self.active, self.active.config.max_accuracy_drop
        return checked_facts(model, measured, active.graph.task, active.accuracy, most)

    def _dealt_model(self, answers: Answers) -> GlobalModel:
        """The run's model, with the bit-widths at which those who answered were sent it."""
        return replace(self.active.model, dealt={seat.client: seat.bit_widths for seat, _ in answers})

    def _keep(self, model: GlobalModel) -> bytes:
        """The model as a durable blob."""
        return self.active.blobs.put(pack_model(Tensors.of(model)))

    def _measured_here(self, model: GlobalModel) -> Measured:
        """By the server on its test data, if it has any and it is time."""
        test = self.active.images.test() if self.active.config.evaluates(model.round) else None
        return Measured() if test is None else measured_on(self.active.method, model, test)


class TrainingWork(RoundWork):
    """Clients train what they were dealt; their updates are merged into the next global model."""

    phase = "training"
    activity = "training"
    answer_name = "update"
    merged_words = "round merged"

    def __init__(self, active: ActiveRun, model: GlobalModel, target: int, slowest: Sequence[float]) -> None:
        super().__init__(active, model, active.next_round)
        self.target = target
        """Clients a whole round has."""
        self._slowest = slowest

    @classmethod
    def plan(
        cls, active: ActiveRun, connected: Sequence[Client], outgoing: Outgoing, slowest: Sequence[float]
    ) -> tuple[TrainingWork, Seating]:
        """The next round of the run: some of the connected clients, and what they are dealt.

        `slowest` are the seconds of the last rounds' slowest answers.
        """
        config, model = active.config, active.model
        candidates = active.as_members(connected)
        if not model.bit_widths:
            records = [member.record for member in candidates]
            model = active.method.start(model.weights, model.side, records)
        target = config.target(len(connected))
        work = cls(active, model, target, slowest)
        return work, work._seat(candidates, config.selected(target, len(candidates)), outgoing)

    @property
    def seconds(self) -> float:
        given = self.active.config.deadline_seconds
        return learned_seconds(self._slowest) if given is None else given

    @property
    def needed(self) -> int:
        return self.active.config.needed(self.target)

    @property
    def grace(self) -> float:
        return self.active.config.grace

    @property
    def closes_early(self) -> bool:
        return self.active.config.over_selection > 0

    def replacements(self, *, missing: int, available: int) -> int:
        return max(0, min(missing, available))

    def progress(self, answered: int, seats: int) -> str:
        return f"{answered} of {self.needed} updates"

    @property
    def evaluates(self) -> bool:
        return self.active.config.test_data is None

    def check(self, data: bytes, seat: Seat, max_samples: int) -> None:
        check_update(self.active.graph, data, self.expected(seat, max_samples))

    def finish(self, store: Store, closed: OpenedRound, timing: Timing, clock: Clock) -> Merged:
        model, commit = self.attempt(closed, timing)
        commit = replace(commit, model=self._keep(model))
        return Merged(store.commit_round(self.address.run_id, commit, clock()), model, commit)

    def attempt(self, closed: OpenedRound, timing: Timing) -> tuple[GlobalModel, TrainingCommit]:
        """The next global model and the facts to commit."""
        clock = Stopwatch()
        active, answers = self.active, closed.answers()
        stored = StoredUpdates(active.graph, active.blobs, answers)
        merged = _undealt(active.method.merge(self._dealt_model(answers), stored))
        updates = stored.told()
        clock.end("merging")
        due = active.calibrates_after(merged.round)
        here = self._calibrated_here(merged) if due else None
        merged, due = here or merged, due and here is None
        clock.end("calibrating")
        check_usable(active.method, merged)
        # What is handed out is measured, and that is not ready before its calibration.
        measured = Measured() if due else self._measured_here(merged)
        if active.config.test_data is None:
            told = {update.client: update.evaluation for update in updates}
            measured = Measured(reported_accuracies(told), "clients", of_this=False)
        clock.end("measuring")
        bytes_up, bytes_down = traffic(closed)
        counted = {record.client: record.samples for record in active.model.clients}
        weights = [min(update.samples, counted[update.client]) for update in updates]
        metrics = {
            "round": merged.round,
            **self._facts(merged, measured),
            "loss": float(np.average([update.loss for update in updates], weights=weights)),
            **time_facts({"training": timing.elapsed, **clock.seconds}),
            "updates": len(answers),
            "rejected": len(closed.seats_in("rejected")),
            "cut": len(closed.seats_in("cut")),
            "declined": len(closed.seats_in("declined")),
            "extended": closed.extended,
            SLOWEST: timing.slowest,
            "bytes_up": sum(bytes_up.values()),
            "bytes_down": sum(bytes_down.values()),
            "bit_widths": list(merged.bit_widths),
            "calibrated_on": "" if here is None else "server",
        }
        seated = {seat.client for seat in closed.seats}
        return merged, TrainingCommit(
            round=merged.round,
            last=not due and merged.round >= active.config.rounds,
            ready=not due and (here is not None or not active.method.calibrates),
            model=b"",
            bit_widths=merged.bit_widths,
            records=[record for record in merged.clients if record.client in seated],
            accuracies=measured.accuracies,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            metrics=metrics,
            keep_models=active.config.keep_models,
        )

    def _calibrated_here(self, merged: GlobalModel) -> GlobalModel | None:
        """With statistics of the server's own images; None: it has none, so clients are asked."""
        images = self.active.images.calibration()
        return None if images is None else self.active.method.calibrated_on(merged, images.images)


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

    def check(self, data: bytes, seat: Seat, max_samples: int) -> None:
        check_calibration(self.active.graph, data, self.expected(seat, max_samples))

    def finish(self, store: Store, closed: OpenedRound, timing: Timing, clock: Clock) -> Merged:
        model, commit = self.attempt(closed, timing)
        commit = replace(commit, model=self._keep(model))
        return Merged(store.commit_calibration(self.address.run_id, commit, clock()), model, commit)

    def attempt(self, closed: OpenedRound, timing: Timing) -> tuple[GlobalModel, CalibrationCommit]:
        """The model with the statistics that clients measured, and the facts to commit."""
        clock = Stopwatch()
        active, answers = self.active, closed.answers()
        told: dict[int, Evaluation | None] = {}
        found = self._calibrations(answers, told)
        model = _undealt(active.method.calibrated(self._dealt_model(answers), found))
        clock.end("calibrating")
        check_usable(active.method, model)
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
            model=b"",
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


def work_of(active: ActiveRun, stored: Round, slowest: Sequence[float]) -> RoundWork:
    """The work of a round that is open in the store."""
    if isinstance(stored, TrainingRound):
        return TrainingWork(active, active.model, stored.target, slowest)
    return CalibrationWork(active, stored.trained)


def _undealt(model: GlobalModel) -> GlobalModel:
    """A new model that nobody has been sent yet."""
    return replace(model, dealt={})
