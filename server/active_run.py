"""The run at work, in memory: its graph, its method, its global model and who is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmpq.data.value_range import ValueRange
from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import calibration_bytes_bound, model_bytes_bound
from fedmpq.method.archive import unpack_model
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs
from fedmpq.server.round_facts import CHECKED
from fedmpq.server.run_config import RunConfig, make_config
from fedmpq.server.run_images import RunImages
from fedmpq.server.run_range import stored_range
from fedmpq.server.served_method import served_method
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Client, Member, Run

MAX_STRIKES = 3
"""A client whose updates were rejected so often is selected no more in this run."""


class ReplayError(RuntimeError):
    """A stored round that this version cannot make again."""


class ActiveRun:
    """One run between its first round and its last."""

    def __init__(self, run: Run, blobs: Blobs, members: Sequence[Member]) -> None:
        self.run = run
        self.blobs = blobs
        self.config: RunConfig = make_config(run.config)
        self.graph_bytes = blobs.read(run.graph)
        self.graph = Graph.from_bytes(self.graph_bytes)
        self.images = RunImages(self.config, self.graph, run.class_names)
        self.method = served_method(self.config, self.graph)
        self.value_range: ValueRange | None = None
        """Of measured values; None: there is none, or the boards have yet to agree on it."""
        self.accuracy: float | None = None
        """By which the next model that is handed out is compared with the last; None: nobody measured it."""
        self.last_metrics: dict[str, Any] = {}
        """What was last measured of the run, for the operator's eyes."""
        self._know(members)
        stored = unpack_model(self.graph, blobs.read(run.model))
        self.model = stored.after(run.round, run.bit_widths, tuple(member.record for member in members))
        self._upload_limits: dict[Phase, int] = {
            "training": model_bytes_bound(self.graph) * 11 // 10,
            "calibration": calibration_bytes_bound(self.graph) * 11 // 10,
        }

    @classmethod
    def load(cls, store: Store, blobs: Blobs, run: Run) -> ActiveRun:
        active = cls(run, blobs, store.members(run.run_id))
        if (found := stored_range(store, run.run_id, active.config)) is not None:
            active.use_range(found)
        if run.ready:
            active.measured(store.round(run.run_id, run.ready).metrics)
        return active

    def use_range(self, value_range: ValueRange) -> None:
        """What the codes of measured values stand for, from now on and for ever."""
        self.value_range = value_range
        self.images.use_range(value_range)

    def configured(self, run: Run) -> None:
        """The operator has changed settings; they hold from the next decision on."""
        self.run = run
        self.config = make_config(run.config)
        self.method = served_method(self.config, self.graph)

    def _know(self, members: Sequence[Member]) -> None:
        self.members = {member.client_id: member for member in members}
        self._numbered = {member.client: member.client_id for member in members}

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
        return self.run.ready < self.model.round and self.calibrates_after(self.model.round)

    def calibrates_after(self, round_number: int) -> bool:
        return self.method.calibrates and self.config.calibrates_after(round_number)

    def may_train(self, client: Client) -> bool:
        """Whether a connected client can be selected at all."""
        member = self.members.get(client.client_id)
        if member is not None and member.strikes >= MAX_STRIKES:
            return False
        return MIN_SAMPLES <= client.counted_samples <= self.config.max_samples

    def as_members(self, connected: Sequence[Client]) -> list[Member]:
        """The connected clients as they are now, by number; those new to the run get the next numbers."""
        new = sorted(
            (client for client in connected if client.client_id not in self.members),
            key=lambda client: client.name,
        )
        joining = [
            Member(client.client_id, ClientRecord(number, client.granted_budget, client.counted_samples))
            for number, client in enumerate(new, start=len(self.members))
        ]
        known = [
            replace(
                member,
                record=replace(member.record, budget=client.granted_budget, samples=client.counted_samples),
            )
            for client in connected
            if (member := self.members.get(client.client_id)) is not None
        ]
        return sorted([*known, *joining], key=lambda member: member.client)

    def strike(self, client: int) -> None:
        """The store has rejected what the client sent."""
        member = self.members[self.client_id(client)]
        self.members[member.client_id] = replace(member, strikes=member.strikes + 1)

    def seated(self, bit_widths: tuple[int, ...], members: Sequence[Member]) -> None:
        """The store has taken clients into the open round: what follows is made from these records."""
        self._know(members)
        records = tuple(member.record for member in members)
        self.model = replace(self.model, bit_widths=bit_widths, clients=records)

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """What is known of a round whose model is handed out."""
        self.last_metrics |= {name: value for name, value in metrics.items() if value not in ({}, "", None)}
        # Rounds of earlier versions have the server's mean alone.
        of_server = metrics.get("mean_deployed_accuracy") if metrics.get("measured_by") == "server" else None
        if (checked := metrics.get(CHECKED, of_server)) is not None:
            self.accuracy = checked

    def merged(self, run: Run, model: GlobalModel, members: Sequence[Member]) -> None:
        """The store has taken the merged round or calibration."""
        self._know(members)
        self.run = run
        self.model = model
