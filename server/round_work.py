"""What the clients of an open round do, and what becomes of their answers; of all kinds, and of training.

All of it blocks, and all of it can be done again after a crash with the same result: it depends on stored
facts only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import WireError, decode_update
from fedmpq.method.evaluation import reported_accuracies
from fedmpq.method.quantized_method import select_clients
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.server.active_run import ActiveRun, ReplayError
from fedmpq.server.blobs import Outgoing
from fedmpq.server.checked_model import Keep, kept_if_usable, not_kept
from fedmpq.server.held_updates import HeldUpdates
from fedmpq.server.learned_deadline import SLOWEST, learned_seconds
from fedmpq.server.round_facts import Measured, checked_facts, measured_on, time_facts, traffic
from fedmpq.server.round_time import Clock, Timing
from fedmpq.server.sent_model import SentModel
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import (
    Client,
    Commit,
    Member,
    OpenedRound,
    RoundAddress,
    Run,
    Seat,
    TrainingCommit,
)
from fedmpq.server.stored_updates import Answers, StoredUpdates
from fedmpq.server.validation import Expected, check_update
from fedmpq.system.stopwatch import Stopwatch

_PREPARED = 8


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
        self.held = HeldUpdates()
        """For a merge in this process."""

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
        seats, made = list[Seat](), dict[tuple[int, ...], tuple[bytes, int]]()
        for record in chosen:
            widths = self.active.method.deal(self.model, record)
            if widths not in made:
                made[widths] = self._sent.offer(widths, outgoing)
            seats.append(Seat(record.client, widths, *made[widths]))
        return tuple(seats)

    def make_payloads_again(self, seats: Sequence[Seat], outgoing: Outgoing) -> None:
        """After a restart: whatever the round's clients may still want to download is there again."""
        for name, seat in {seat.payload: seat for seat in seats}.items():
            widths, sent = seat.bit_widths, self._sent_to(seat)
            if not sent.offer_again(name, widths, outgoing):
                raise ReplayError(
                    f"a payload of run {self.active.run.name!r}, round {self.address.number}, cannot be made "
                    "again: another version of fedmpq opened this round; go on with that one, or abort the "
                    "run"
                )

    def plain_payload(self, seat: Seat) -> tuple[bytes, int] | None:
        """For boards that read no entropy codes; None: the seat's own payload is."""
        return self._sent_to(seat).plain(seat.payload)

    def _sent_to(self, seat: Seat) -> SentModel:
        """What the seat's client was sent."""
        return self._sent

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
        config, sent = self.active.config, self._sent_to(seat)
        return Expected(
            run_id=self.address.run_id,
            round=self.address.sent(seat).number,
            client=seat.client,
            layers=sent.layers(seat.bit_widths),
            side=sent.side(seat.bit_widths),
            max_samples=min(max_samples, config.max_samples),
            max_norm=config.max_update_norm,
            bounds=sent.statistics_bounds(seat.bit_widths),
            update=self.active.method.recipe.plan.update,
        )

    @abstractmethod
    def check(self, name: bytes, data: bytes, seat: Seat, max_samples: int) -> None:
        """Raises Rejected if the blob of that name is no answer to what the seat was dealt."""

    @abstractmethod
    def hold(self, name: bytes, data: bytes) -> None:
        """An answer that somebody else has checked: what its merge needs is made now, if there is room."""

    def prepare_checks(self, seats: Sequence[Seat]) -> None:
        """What the checks of most answers need; of many different bit-widths some."""
        for widths in list(dict.fromkeys(seat.bit_widths for seat in seats))[:_PREPARED]:
            self._sent.statistics_bounds(widths)

    def finish(self, store: Store, closed: OpenedRound, timing: Timing, clock: Clock) -> Merged:
        """Merge the answers of a closed round and store what it has come to."""
        model, commit = self.prepare(closed, timing)
        return Merged(self.commit(store, commit, clock()), model, commit)

    def prepare(self, closed: OpenedRound, timing: Timing) -> tuple[GlobalModel, Commit]:
        """The same without the last step: the model is durable, and the commit names it."""
        return self.attempt(closed, timing, self.active.blobs.put)

    @abstractmethod
    def commit(self, store: Store, commit: Commit, now: float) -> Run:
        """Store what the round has come to."""

    @abstractmethod
    def attempt(
        self, closed: OpenedRound, timing: Timing, keep: Keep = not_kept
    ) -> tuple[GlobalModel, Commit]:
        """What the answers of a closed round come to, with nothing but the model stored, by `keep`.

        Raises if they make no model that boards can run, or one that is too much worse than the last.
        """

    def _facts(self, model: GlobalModel, measured: Measured) -> dict[str, Any]:
        """The accuracy, unless it is too much worse."""
        active, most = self.active, self.active.config.max_accuracy_drop
        return checked_facts(model, measured, active.graph.task, active.accuracy, most)

    def _dealt_model(self, answers: Answers) -> GlobalModel:
        """The run's model, with the bit-widths at which those who answered were sent it."""
        return replace(self.active.model, dealt={seat.client: seat.bit_widths for seat, _ in answers})

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
        """Clients a whole round has; changes that make the next version, where merges are asynchronous."""
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
        work = cls(active, model, config.asynchronous or target, slowest)
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

    def check(self, name: bytes, data: bytes, seat: Seat, max_samples: int) -> None:
        self.held.keep(name, check_update(self.active.graph, data, self.expected(seat, max_samples)))

    def hold(self, name: bytes, data: bytes) -> None:
        # One that cannot be read so is the merge's to tell of.
        with suppress(WireError):
            self.held.keep(name, decode_update(self.active.graph, data)[1])

    def commit(self, store: Store, commit: Commit, now: float) -> Run:
        assert isinstance(commit, TrainingCommit)
        return store.commit_round(self.address.run_id, commit, now)

    def attempt(
        self, closed: OpenedRound, timing: Timing, keep: Keep = not_kept
    ) -> tuple[GlobalModel, TrainingCommit]:
        """The next global model and the facts to commit."""
        clock = Stopwatch()
        active, answers = self.active, closed.answers()
        stored = StoredUpdates(active.graph, active.blobs, answers, self.held)
        merged = undealt(self._merge(answers, stored))
        updates = stored.told()
        clock.end("merging")
        due = active.calibrates_after(merged.round)
        here = self._calibrated_here(merged) if due else None
        merged, due = here or merged, due and here is None
        ready = not due and (here is not None or not active.method.calibrates)
        clock.end("calibrating")
        name = kept_if_usable(active.method, merged, keep)
        # What is handed out is measured, and that is not ready before its calibration.
        measured = self._measured_here(merged) if ready else Measured()
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
            ready=ready,
            model=name,
            bit_widths=merged.bit_widths,
            records=[record for record in merged.clients if record.client in seated],
            accuracies=measured.accuracies,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            metrics=metrics,
            keep_models=active.config.keep_models,
        )

    def _merge(self, answers: Answers, updates: StoredUpdates) -> GlobalModel:
        return self.active.method.merge(self._dealt_model(answers), updates)

    def _calibrated_here(self, merged: GlobalModel) -> GlobalModel | None:
        """With statistics of the server's own images; None: it has none, so clients are asked."""
        images = self.active.images.calibration()
        return None if images is None else self.active.method.calibrated_on(merged, images.images)


def undealt(model: GlobalModel) -> GlobalModel:
    """A new model that nobody has been sent yet."""
    return replace(model, dealt={})
