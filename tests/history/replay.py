"""W as it follows from stored facts: from the first model, through the updates of every committed round.

The tensors are computed by the method's own code, fed with the copies of updates that clients kept of what
they sent; `slow_merge` computes the weights again by another way. Of asynchronous merges the store's order
of arrivals is all that is taken over: which client's change, of which version, is in which merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedmpq.exchange.messages import Update
from fedmpq.exchange.wire import decode_calibration, decode_update, digest
from fedmpq.method.archive import Tensors, pack_model, unpack_model
from fedmpq.method.buffered_merge import Version
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.server.run_config import make_config
from fedmpq.server.run_images import RunImages
from fedmpq.server.sent_model import SentModel
from fedmpq.server.served_method import served_method
from fedmpq.server.store.records import CalibrationRound, OpenedRound, Round, TrainingRound
from tests.history.facts import First, Stored


@dataclass(frozen=True)
class Step:
    """One round's training or calibration, made again."""

    round: Round
    sent: GlobalModel
    """The model that the round changes."""
    bases: dict[int, GlobalModel]
    """By client: what it was sent, at its bit-widths; not always `sent` where merges are asynchronous."""
    payloads: dict[int, bytes]
    """By client: the hash of what it must have been sent."""
    updates: tuple[Update, ...]
    """Those that were merged, in order; none in a calibration."""
    model: GlobalModel
    """The run's model after it; the one before if the round is still open."""


class Replay:
    """A run made again from what it began with."""

    def __init__(self, first: First, stored: Stored, payloads: Mapping[bytes, bytes]) -> None:
        self.graph = Graph.from_bytes(first.graph)
        self.config = make_config(stored.run.config)
        self.method = served_method(self.config, self.graph)
        self._images = RunImages(self.config, self.graph, stored.run.class_names)
        self._stored = stored
        self._payloads = payloads
        self._model = unpack_model(self.graph, first.model).after(
            0, (), tuple(member.record for member in stored.members)
        )
        self._versions = {0: self._model}

    def steps(self) -> Iterator[Step]:
        """One for each round in the store. Raises KeyError for an update of which no client has a copy."""
        for each in self._stored.rounds:
            yield self._train(each) if isinstance(each, TrainingRound) else self._calibrate(each)

    def _train(self, each: TrainingRound) -> Step:
        sent = self._model
        bases = {seat.client: self._versions[each.address.sent(seat).number - 1] for seat in each.seats}
        updates: list[Update] = []
        if each.state == "committed":
            updates = [decode_update(self.graph, self._payloads[name])[1] for name in _merged(each)]
            if self.config.asynchronous is None:
                merged = self.method.merge(_dealt(sent, each), updates)
            else:
                merged = self._buffered(each, bases, updates)
            self._model = replace(merged, dealt={})
            if each.metrics.get("calibrated_on") == "server":
                images = self._images.calibration()
                assert images is not None
                self._model = self.method.calibrated_on(self._model, images.images)
            self._versions[self._model.round] = self._model
        return Step(each, sent, bases, self._sent(bases, each), tuple(updates), self._model)

    def _buffered(
        self, each: TrainingRound, bases: Mapping[int, GlobalModel], updates: Sequence[Update]
    ) -> GlobalModel:
        """As a simulation does it, one change after the other in the order in which they were sent out."""
        records = {record.client: record for record in self._model.clients}
        versions: dict[int, Version] = {}
        for seat, _ in each.answers():
            base = bases[seat.client]
            known = versions.get(base.round) or self.method.version(replace(base, average=None))
            versions[base.round] = known.sent_to(records[seat.client], seat.bit_widths)
        buffer = self.method.buffer(self._model, versions)
        for update in sorted(updates, key=lambda update: (update.round, update.client)):
            buffer.add(update)
        return buffer.finish()

    def _calibrate(self, each: CalibrationRound) -> Step:
        sent = self._model.final
        if each.state == "committed":
            found = [decode_calibration(self.graph, self._payloads[name])[1] for name in _merged(each)]
            calibrated = self.method.calibrated(_dealt(self._model, each), found)
            self._model = self._versions[self._model.round] = replace(calibrated, dealt={})
        bases = dict.fromkeys((seat.client for seat in each.seats), sent)
        return Step(each, sent, bases, self._sent(bases, each), (), self._model)

    def _sent(self, bases: Mapping[int, GlobalModel], each: OpenedRound) -> dict[int, bytes]:
        sent: dict[int, SentModel] = {}
        made: dict[tuple[int, tuple[int, ...]], bytes] = {}
        for seat in each.seats:
            base = bases[seat.client]
            if (key := (base.round, seat.bit_widths)) not in made:
                known = sent.setdefault(base.round, SentModel(self.graph, self.method.quantizer(base)))
                made[key] = digest(known.payload(seat.bit_widths))
        return {seat.client: made[bases[seat.client].round, seat.bit_widths] for seat in each.seats}


def name_of(model: GlobalModel) -> bytes:
    """The hash under which the store keeps it."""
    return digest(pack_model(Tensors.of(model)))


def _merged(each: OpenedRound) -> list[bytes]:
    return [answer.payload for _, answer in each.answers()]


def _dealt(model: GlobalModel, each: OpenedRound) -> GlobalModel:
    return replace(model, dealt={seat.client: seat.bit_widths for seat, _ in each.answers()})
