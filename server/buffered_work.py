"""Training without rounds: boards are sent the newest version of the model whenever they are ready, and so
many of their changes make the next (FedBuff).

A round is one merge. Whoever is still at work when it is made goes over to the next one with the version it
was sent, of which the model is kept as long as it is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedmpq.method.archive import unpack_model
from fedmpq.method.buffered_merge import Version
from fedmpq.method.staleness import Buffering
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.server.active_run import ActiveRun
from fedmpq.server.blobs import Outgoing
from fedmpq.server.checked_model import Keep, not_kept
from fedmpq.server.round_time import Timing
from fedmpq.server.round_work import TrainingWork
from fedmpq.server.sent_model import SentModel
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import CarriedOver, OpenedRound, Seat, TrainingCommit
from fedmpq.server.stored_updates import Answers, StoredUpdates


@dataclass(frozen=True)
class SentVersion:
    """A version of the model that boards were sent."""

    version: Version
    sent: SentModel


class BufferedWork(TrainingWork):
    """The work of one merge: changes of several versions of the model."""

    def __init__(
        self,
        active: ActiveRun,
        model: GlobalModel,
        target: int,
        slowest: Sequence[float],
        in_flight: Mapping[int, SentVersion] | None = None,
    ) -> None:
        """`in_flight` are the earlier versions that boards are still at work on; after a restart
        `make_payloads_again` reads them."""
        super().__init__(active, model, target, slowest)
        newest = SentVersion(active.method.version(replace(model, average=None)), self._sent)
        self._versions = {**(in_flight or {}), model.round: newest}
        self.is_last = False
        """Whether the run ends with this merge, so that nobody goes over to another."""

    def following(
        self, model: GlobalModel, seats: Sequence[Seat], target: int, slowest: Sequence[float]
    ) -> BufferedWork:
        """The work of the next merge, into which those seats have gone over."""
        used = {seat.version for seat in seats}
        in_flight = {number: known for number, known in self._versions.items() if number in used}
        return BufferedWork(self.active, model, target, slowest, in_flight)

    # Dealing

    def deal(self, chosen: Sequence[ClientRecord], outgoing: Outgoing) -> tuple[Seat, ...]:
        return tuple(replace(seat, version=self.model.round) for seat in super().deal(chosen, outgoing))

    def payloads(self, seats: Sequence[Seat]) -> set[bytes]:
        """All that the clients of these seats may want to download."""
        plain = [self.plain_payload(seat) for seat in seats]
        return {seat.payload for seat in seats} | {each[0] for each in plain if each is not None}

    def _sent_to(self, seat: Seat) -> SentModel:
        return self._in_flight(seat).sent

    def _in_flight(self, seat: Seat) -> SentVersion:
        """The version that the seat was sent, if boards are at work on it in this merge.

        A seat that lost its place while its answer was on its way does not keep its version: the blob of that
        may be gone.
        """
        assert seat.version is not None
        if (known := self._versions.get(seat.version)) is not None:
            return known
        reason = self._buffering.refusal(seat.version, self.model.round)
        raise UpdateRefused(reason or f"nobody is at work on version {seat.version} of the model any more")

    def make_payloads_again(self, seats: Sequence[Seat], outgoing: Outgoing) -> None:
        """After a restart the versions in flight are read; what has a seat in an open merge is kept."""
        for seat in seats:
            if seat.version not in self._versions:
                self._read_version(seat)
        super().make_payloads_again(seats, outgoing)

    def _read_version(self, seat: Seat) -> None:
        assert seat.version is not None
        assert seat.sent_model is not None
        active = self.active
        stored = unpack_model(active.graph, active.blobs.read(seat.sent_model))
        version = active.method.version(
            replace(stored.after(seat.version, (), active.model.clients), average=None)
        )
        self._versions[seat.version] = SentVersion(version, SentModel(active.graph, version.quantizer))

    # Collecting

    @property
    def seconds(self) -> float:
        """No deadline: what can be late is each board, and not the merge."""
        return 0.0

    @property
    def flight_seconds(self) -> float:
        """How long a board that is there and silent counts as being at work; 0: as long as it takes."""
        return super().seconds

    def refusal(self, version: int) -> str | None:
        """Why a change of that version cannot be in the next merge any more; None: it can."""
        return self._buffering.refusal(version, self.address.number)

    @property
    def _buffering(self) -> Buffering:
        buffering = self.active.method.recipe.buffering
        assert buffering is not None
        return buffering

    # Merging

    def attempt(
        self, closed: OpenedRound, timing: Timing, keep: Keep = not_kept
    ) -> tuple[GlobalModel, TrainingCommit]:
        """The next version. Those at work go over to the merge after this, unless they are too late by then;
        what is known of them is told of the merge that they end up in."""
        dropped: dict[int, str] = {}
        seats: list[Seat] = []
        for seat in closed.seats:
            if seat.state != "selected":
                seats.append(seat)
            elif seat.version is not None and (reason := self.refusal(seat.version)) is not None:
                dropped[seat.client] = reason
                seats.append(replace(seat, state="cut", reason=reason))
        kept = replace(closed, seats=tuple(seats))
        model, commit = super().attempt(kept, timing, keep)
        merged = [seat for seat, _ in kept.answers()]
        staleness = [closed.address.staleness(seat) for seat in merged]
        metrics = {**commit.metrics, "staleness": sum(staleness) / len(staleness)}
        commit = replace(commit, metrics=metrics)
        if self.is_last:
            return model, commit
        carried = CarriedOver(self.target, frozenset(seat.client for seat in merged), dropped)
        return model, replace(commit, last=False, carried=carried)

    def _merge(self, answers: Answers, updates: StoredUpdates) -> GlobalModel:
        model, dealt = self.active.model, dict[int, dict[int, tuple[int, ...]]]()
        versions: dict[int, Version] = {}
        for seat, _ in answers:
            known = self._in_flight(seat).version
            number = known.model.round
            dealt.setdefault(number, {})[seat.client] = seat.bit_widths
            # A client has one place at a time: what is known of it is what it was chosen with.
            sent = replace(known.model, clients=model.clients, dealt=dealt[number])
            versions[number] = replace(known, model=sent)
        buffer = self.active.method.buffer(model, versions)
        for update in updates:
            buffer.add(update)
        return buffer.finish()
