"""The run at work, in memory: its graph, method and global model, and what a round does with them.

All of it blocks, and all of it can be done again after a crash with the same result: it depends on stored
facts only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.exchange.messages import Calibration, Phase, Update, pack_layers
from fedmpq.exchange.wire import (
    calibration_bytes_bound,
    decode_calibration,
    decode_update,
    encode_model,
    model_bytes_bound,
)
from fedmpq.method.archive import Tensors, pack_model, unpack_model
from fedmpq.method.evaluation import by_budget, deployed_accuracies, reported_accuracies
from fedmpq.method.quantized_method import QuantizedMethod, RoundQuantizer, select_clients
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs, Outgoing
from fedmpq.server.connections import Announcement
from fedmpq.server.run_config import RunConfig, load_calibration_data, load_test_data, make_config
from fedmpq.server.statistics_bounds import statistics_bounds
from fedmpq.server.store import (
    CalibrationCommit,
    Joining,
    Member,
    NewSeat,
    Round,
    RoundCommit,
    Run,
    Seat,
    Store,
)
from fedmpq.server.validation import Expected, check_calibration, check_update
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

MAX_STRIKES = 3
"""A client whose updates were rejected so often is selected no more in this run."""


class ReplayError(RuntimeError):
    """A stored round that this version cannot make again."""


@dataclass(frozen=True)
class RoundPlan:
    """A round about to open."""

    target: int
    bit_widths: tuple[int, ...]
    """The run's, from which the deal starts."""
    joining: tuple[Joining, ...]
    seats: tuple[NewSeat, ...]


@dataclass(frozen=True)
class Sent:
    """What the clients of a round are sent. Uploads are checked against it in threads of their own, perhaps
    while the next model is in the making."""

    phase: Phase
    round: int
    quantizer: RoundQuantizer
    _bounds: dict[tuple[int, ...], dict[str, NDArray[np.float64]]] = field(default_factory=dict)

    def statistics_bounds(self, graph: Graph, widths: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
        """How large the statistics of the model at these bit-widths can be; many boards have the same."""
        if widths not in self._bounds:
            layers, side = self.quantizer.layers(widths), self.quantizer.sent_side(widths)
            self._bounds[widths] = statistics_bounds(graph, layers, side)
        return self._bounds[widths]

    def payload(self, graph: Graph, widths: tuple[int, ...]) -> bytes:
        """What `QuantizedMethod.assign` or `.calibration` sends, as bytes."""
        layers = pack_layers(self.quantizer.layers(widths))
        return encode_model(graph, layers, self.quantizer.sent_side(widths))


class ActiveRun:
    """One run between its first round and its last."""

    def __init__(self, run: Run, blobs: Blobs, members: Sequence[Member], outgoing: Outgoing) -> None:
        self.run = run
        self.config: RunConfig = make_config(run.config)
        self.graph_bytes = blobs.read(run.graph)
        self.graph = Graph.from_bytes(self.graph_bytes)
        self.method = QuantizedMethod(self.graph, self.config.recipe(), self.config.seed)
        self._numbered = {member.client: member.client_id for member in members}
        self.members = {member.client_id: member for member in members}
        records = tuple(member.record for member in members)
        stored = unpack_model(self.graph, blobs.read(run.model))
        self.model = stored.after(run.round, run.bit_widths or (), records)
        self.sent = self._for_training()
        self._blobs = blobs
        self._outgoing = outgoing
        self._test: Dataset | None = None
        self._calibration_images: Dataset | None = None
        self._upload_limits: dict[Phase, int] = {
            "training": model_bytes_bound(self.graph) * 11 // 10,
            "calibration": calibration_bytes_bound(self.graph) * 11 // 10,
        }

    @classmethod
    def load(cls, store: Store, blobs: Blobs, outgoing: Outgoing, run: Run) -> ActiveRun:
        return cls(run, blobs, store.members(run.run_id), outgoing)

    @property
    def next_round(self) -> int:
        return self.model.round + 1

    def client_id(self, client: int) -> str:
        return self._numbered[client]

    def upload_limit(self, phase: Phase) -> int:
        """No honest upload is longer."""
        return self._upload_limits[phase]

    @property
    def calibration_due(self) -> bool:
        """Whether the statistics of what the last round made are to be measured before anything else."""
        return self.run.ready < self.model.round and self._calibrates_after(self.model.round)

    def _calibrates_after(self, round_number: int) -> bool:
        return self.method.calibrates and self.config.calibrates_after(round_number)

    def _for_training(self) -> Sent:
        return Sent("training", self.next_round, self.method.quantizer(self.model))

    def _for_calibration(self) -> Sent:
        return Sent("calibration", self.model.round, self.method.quantizer(self.model.final))

    def may_train(self, client: Announcement) -> bool:
        """Whether a connected client can be selected at all."""
        member = self.members.get(client.client_id)
        if member is not None and member.strikes >= MAX_STRIKES:
            return False
        return MIN_SAMPLES <= client.samples <= self.config.max_samples

    # Opening

    def plan_round(self, connected: Sequence[Announcement]) -> RoundPlan:
        """Select among the connected clients and deal to them. Those new to the run get the next numbers."""
        self.sent = self._for_training()
        joining = self._number(connected)
        target = self.config.target(len(connected))
        records = self._records(connected, joining)
        model = self.model
        if not model.bit_widths:
            model = self.method.start(model.weights, model.side, records)
        count = self.config.selected(target, len(records))
        chosen = select_clients(records, self.config.seed, self.next_round, count)
        return RoundPlan(target, model.bit_widths, joining, self._deal(model, chosen))

    def plan_refill(self, connected: Sequence[Announcement], count: int) -> RoundPlan:
        """Up to `count` more clients for the open round."""
        joining = self._number(connected)
        records = self._records(connected, joining)
        chosen = select_clients(records, self.config.seed, self.next_round, min(count, len(records)))
        model = self.model if self.sent.phase == "training" else self.model.final
        return RoundPlan(0, self.model.bit_widths, joining, self._deal(model, chosen))

    def _number(self, connected: Sequence[Announcement]) -> tuple[Joining, ...]:
        new = [client for client in connected if client.client_id not in self.members]
        first = len(self.members)
        return tuple(
            Joining(first + n, client.client_id, client.budget, client.samples)
            for n, client in enumerate(sorted(new, key=lambda client: client.name))
        )

    def _records(self, connected: Sequence[Announcement], joining: Sequence[Joining]) -> list[ClientRecord]:
        """The connected clients as they are now, by number."""
        numbers = {one.client_id: one.client for one in joining}
        records = []
        for client in connected:
            member = self.members.get(client.client_id)
            known = member.record if member else ClientRecord(numbers[client.client_id], 0, 0)
            records.append(replace(known, budget=client.budget, samples=client.samples))
        return sorted(records, key=lambda record: record.client)

    def _deal(self, model: GlobalModel, chosen: Sequence[ClientRecord]) -> tuple[NewSeat, ...]:
        """Seats with what `self.sent` has for each."""
        seats: list[NewSeat] = []
        made: dict[tuple[int, ...], tuple[bytes, int]] = {}
        for record in chosen:
            widths = self.method.deal(model, record)
            if widths not in made:
                data = self.sent.payload(self.graph, widths)
                made[widths] = self._outgoing.put(data), len(data)
            seats.append(NewSeat(record.client, record.budget, record.samples, widths, *made[widths]))
        return tuple(seats)

    def plan_calibration(self, trained: Sequence[Seat]) -> tuple[NewSeat, ...]:
        """Who measures the statistics: those that have just trained, being at hand; at the end of the run
        everybody, whoever may be reached by then."""
        self.sent = self._for_calibration()
        if self.model.round >= self.config.rounds:
            chosen = {member.client for member in self.members.values() if member.strikes < MAX_STRIKES}
        else:
            chosen = {seat.client for seat in trained if seat.state == "updated"}
        records = [record for record in self.model.clients if record.client in chosen]
        return self._deal(self.model.final, records)

    def seated(self, plan: RoundPlan, members: Sequence[Member]) -> None:
        """The store has taken the plan: what follows is made from these records."""
        self._know(members)
        records = tuple(member.record for member in members)
        self.model = replace(self.model, bit_widths=plan.bit_widths, clients=records)

    def merged(self, run: Run, model: GlobalModel, members: Sequence[Member]) -> None:
        """The store has taken the merged round or calibration."""
        self._know(members)
        self.run = run
        self.model = model
        self.sent = self._for_training()

    def _know(self, members: Sequence[Member]) -> None:
        self.members = {member.client_id: member for member in members}
        self._numbered = {member.client: member.client_id for member in members}

    def take_up(self, opened: Round) -> None:
        """After a restart: whatever the round's clients may still want to download is there again."""
        self.sent = self._for_training() if opened.phase == "training" else self._for_calibration()
        for name, widths in {seat.payload: seat.bit_widths for seat in opened.seats}.items():
            if self._outgoing.holds(name):
                continue
            if self._outgoing.put(self.sent.payload(self.graph, widths)) != name:
                raise ReplayError(
                    f"a payload of run {self.run.name!r}, round {opened.round}, cannot be made again: "
                    "another version of fedmpq opened this round; go on with that one, or abort the run"
                )

    # Updates

    def check(self, sent: Sent, data: bytes, seat: Seat, max_samples: int) -> Update | Calibration:
        """The update or calibration a client gives for what it was sent, or Rejected."""
        expected = Expected(
            run_id=self.run.run_id,
            round=sent.round,
            client=seat.client,
            layers=sent.quantizer.layers(seat.bit_widths),
            side=sent.quantizer.sent_side(seat.bit_widths),
            max_samples=min(max_samples, self.config.max_samples),
            max_norm=self.config.max_update_norm,
            update=self.method.recipe.plan.update,
        )
        if sent.phase == "training":
            return check_update(self.graph, data, expected)
        bounds = sent.statistics_bounds(self.graph, seat.bit_widths)
        return check_calibration(self.graph, data, expected, bounds)

    # Merging

    def merge(self, closed: Round, now: float) -> tuple[GlobalModel, RoundCommit]:
        """The next global model and the facts to commit; its blob is durable when this returns."""
        started = time.monotonic()
        updated = [seat for seat in closed.seats if seat.state == "updated"]
        facts: list[Update] = []
        merged = self.method.merge(self.model, self._updates(updated, facts))
        due = self._calibrates_after(merged.round)
        here = self._calibrated_here(merged) if due else None
        merged, due = here or merged, due and here is None
        # The server measures what is handed out, and that is not ready before its calibration.
        waits = due and self.config.test_data is not None
        accuracies, measured_by = ({}, "") if waits else self._measure(merged, facts)
        bytes_up = {seat.client: seat.update_bytes or 0 for seat in updated}
        bytes_down = {seat.client: seat.payload_bytes for seat in closed.seats}
        seated = {seat.client for seat in closed.seats}
        weights = [update.samples for update in facts]
        metrics = {
            "round": merged.round,
            **_accuracy_facts(merged, accuracies, measured_by),
            "loss": float(np.average([update.loss for update in facts], weights=weights)),
            "seconds": max(0.0, now - closed.opened) + time.monotonic() - started,
            "updates": len(updated),
            "rejected": sum(seat.state == "rejected" for seat in closed.seats),
            "cut": sum(seat.state == "cut" for seat in closed.seats),
            "extended": closed.extended,
            "bytes_up": sum(bytes_up.values()),
            "bytes_down": sum(bytes_down.values()),
            "bit_widths": list(merged.bit_widths),
            "calibrated_on": "" if here is None else "server",
        }
        return merged, RoundCommit(
            round=merged.round,
            last=not due and merged.round >= self.config.rounds,
            ready=not due and (here is not None or not self.method.calibrates),
            model=self._blobs.put(pack_model(Tensors.of(merged))),
            bit_widths=merged.bit_widths,
            records=[record for record in merged.clients if record.client in seated],
            accuracies=accuracies,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            metrics=metrics,
            keep_models=self.config.keep_models,
        )

    def calibrate(self, trained: Round, closed: Round, now: float) -> tuple[GlobalModel, CalibrationCommit]:
        """The model with the statistics that clients measured, and the facts to commit, as `merge` does."""
        started = time.monotonic()
        answered = [seat for seat in closed.seats if seat.state == "updated"]
        model = self.method.calibrated(self.model, self._calibrations(answered))
        facts, accuracies = dict(trained.metrics or {}), dict[int, float]()
        if self.config.test_data is not None:
            accuracies, measured_by = self._measure(model, ())
            facts |= _accuracy_facts(model, accuracies, measured_by)
        bytes_up = {seat.client: seat.update_bytes or 0 for seat in answered}
        bytes_down = {seat.client: seat.payload_bytes for seat in closed.seats}
        metrics = facts | {
            "calibrated_on": "clients",
            "calibrated_by": len(answered),
            "rejected": facts.get("rejected", 0) + sum(seat.state == "rejected" for seat in closed.seats),
            "seconds": facts.get("seconds", 0.0) + max(0.0, now - closed.opened) + time.monotonic() - started,
            "bytes_up": facts.get("bytes_up", 0) + sum(bytes_up.values()),
            "bytes_down": facts.get("bytes_down", 0) + sum(bytes_down.values()),
        }
        return model, CalibrationCommit(
            round=model.round,
            last=model.round >= self.config.rounds,
            model=self._blobs.put(pack_model(Tensors.of(model))),
            accuracies=accuracies,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            metrics=metrics,
            keep_models=self.config.keep_models,
        )

    def _calibrations(self, seats: Sequence[Seat]) -> Iterator[Calibration]:
        for seat in seats:
            assert seat.update is not None
            yield decode_calibration(self.graph, self._blobs.read(seat.update))[1]

    def _calibrated_here(self, merged: GlobalModel) -> GlobalModel | None:
        """With statistics of the server's own images; None: it has none, so clients are asked."""
        if self._calibration_images is None:
            try:
                self._calibration_images = load_calibration_data(self.config)
            except DataError as error:
                say(log, "no calibration data", level=logging.ERROR, run=self.run.name, error=str(error))
        images = self._calibration_images
        return None if images is None else self.method.calibrated_on(merged, images.images)

    def _updates(self, seats: Sequence[Seat], facts: list[Update]) -> Iterator[Update]:
        """One at a time, in the order of client numbers; `facts` keeps what is left without the tensors."""
        for seat in seats:
            assert seat.update is not None
            _, update = decode_update(self.graph, self._blobs.read(seat.update))
            facts.append(replace(update, layers={}, side={}))
            yield update

    def _measure(self, merged: GlobalModel, facts: Sequence[Update]) -> tuple[dict[int, float], str]:
        if self.config.test_data is None:
            return reported_accuracies({update.client: update.evaluation for update in facts}), "clients"
        if not self.config.evaluates(merged.round):
            return {}, ""
        if self._test is None:
            try:
                self._test = load_test_data(self.config)
            except DataError as error:
                # The round is worth more than its measurement.
                say(log, "no test data", level=logging.ERROR, run=self.run.name, error=str(error))
                return {}, ""
        assert self._test is not None
        return deployed_accuracies(self.method, merged, self._test), "server"


def _accuracy_facts(model: GlobalModel, accuracies: dict[int, float], measured_by: str) -> dict[str, Any]:
    return {
        "deployed_accuracy": by_budget(accuracies, model.clients),
        "mean_deployed_accuracy": float(np.mean(list(accuracies.values()))) if accuracies else None,
        "measured_by": measured_by if accuracies else "",
    }
