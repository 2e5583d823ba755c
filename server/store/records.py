"""The stored facts as values: clients, runs, who is in a run, its rounds and their seats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedmpq.exchange.messages import Phase
from fedmpq.method.state import ClientRecord
from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits

RunState = Literal["waiting", "running", "paused", "finished", "aborted"]
SeatState = Literal["selected", "updated", "rejected", "cut", "declined"]
LEFT: tuple[SeatState, ...] = ("cut", "declined")
"""Of places that are free again; their clients may get one anew."""
ENDED: tuple[RunState, ...] = ("finished", "aborted")
ReleaseState = Literal["canary", "full", "rolled_back", "superseded"]


@dataclass(frozen=True)
class Client:
    """A board that has enrolled, with what it said of itself last."""

    client_id: str
    name: str
    secret_hash: bytes
    certificate_name: str | None
    """Common name of the certificate it enrolled with; None: it showed none."""
    budget: float
    samples: int
    version: str
    engine: str
    created: float
    first_seen: float | None
    """None until its first call."""
    revoked: float | None
    """None: it may call."""
    limits: ClaimLimits = UNLIMITED

    @property
    def counted_samples(self) -> int:
        """What it claims, as far as the operator lets it."""
        return self.limits.samples(self.samples)

    @property
    def granted_budget(self) -> float:
        """What it asks for, as far as the operator lets it have it."""
        return self.limits.budget(self.budget)


@dataclass(frozen=True)
class Leader:
    """The server that leads, or has led last."""

    holder: str
    epoch: int
    left: float
    """Seconds until its lease is over; negative: since then."""


@dataclass(frozen=True)
class Sighting:
    """When a board was last connected, and what it showed then."""

    client_id: str
    last_seen: float
    certificate_ends: float | None
    """Until when its certificate is valid; None: it showed none."""
    free_bytes: int | None
    """On its disk; None: it did not say."""


@dataclass(frozen=True)
class FrontEnd:
    """A process that boards connect to, beside the leader."""

    front_id: str
    address: str
    version: int
    """Grows with every change of the boards at it."""
    left: float
    """Seconds until it counts as gone unless it says otherwise; negative: since then."""


@dataclass(frozen=True)
class Present:
    """A board at a front-end."""

    client_id: str
    here: bool
    """Whether its stream is open."""
    said: Mapping[str, Any]
    """What is known of it there, as `server.presence` writes it."""


@dataclass(frozen=True)
class Forwarded:
    """What a board said to a front-end that has not its stream."""

    client_id: str
    ready_for: str | None
    """The run it is ready for; None: it cannot take part."""
    declined: str = ""
    """Why it cannot."""


@dataclass(frozen=True)
class UploadPart:
    """A piece of an upload that broke off."""

    start: int
    size: int
    blob: bytes
    """Hash of the piece."""

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Described:
    """What a client says of itself."""

    client_id: str
    budget: float
    samples: int
    version: str
    engine: str


@dataclass(frozen=True)
class Run:
    """A run as it stands after its last merged round."""

    sequence: int
    run_id: str
    name: str
    config: dict[str, Any]
    class_names: tuple[str, ...]
    state: RunState
    reason: str
    graph: bytes
    """Hash of the graph's blob."""
    model: bytes
    """Hash of the blob that holds the weights and side tensors after `round` rounds."""
    bit_widths: tuple[int, ...]
    """Averaged bit-widths from which the next deal starts; empty before the first round has opened."""
    round: int
    """The last round merged; 0: none."""
    ready: int
    """The last round whose model can be handed out, with statistics if any are to be measured; 0: none."""
    bytes_up: int
    bytes_down: int
    created: float
    ended: float | None
    """None: it goes on."""


@dataclass(frozen=True)
class Member:
    """A client's part in a run. Its budget and samples are as they were when it was last dealt to."""

    client_id: str
    record: ClientRecord
    strikes: int = 0
    """Rejected updates and calibrations."""
    accuracy: float | None = None
    """Of the model it was last evaluated with; None: it was never measured."""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def client(self) -> int:
        """Its number in the run."""
        return self.record.client


@dataclass(frozen=True)
class Answer:
    """What a client gave back: an update in training, statistics in a calibration."""

    payload: bytes
    """Hash of its blob."""
    payload_bytes: int
    receipt_id: str


@dataclass(frozen=True)
class Answered:
    """An answer that has just come, its blob durable."""

    client: int
    payload: bytes
    """Hash of its blob."""
    payload_bytes: int
    sent: bytes | None = None
    """Hash of what the client was sent and the answer was checked against; None: it is not looked at."""


@dataclass(frozen=True)
class Seat:
    """A client's place in a round, and what it was dealt there."""

    client: int
    bit_widths: tuple[int, ...]
    """What it was dealt: its payload is made of them, and its answer is checked and merged by them."""
    payload: bytes
    payload_bytes: int
    state: SeatState = "selected"
    reason: str = ""
    """Why it was rejected or cut, why the client declined, or why it is asked for its answer again."""
    answer: Answer | None = None
    """None unless the state is "updated"."""
    version: int | None = None
    """Which version of the model it was sent, where merges are asynchronous: the number of merges behind it.

    None: the one before its round, or in a calibration that of its round.
    """
    sent_model: bytes | None = None
    """Hash of that version's blob, once it is no longer the run's own model."""


@dataclass(frozen=True)
class ThrownOut:
    """An answer that had a receipt and does not count."""

    number: int
    phase: Phase
    client: int
    payload: bytes
    receipt_id: str
    reason: str
    struck: bool
    """Whether it counts against its sender."""


@dataclass(frozen=True)
class RoundAddress:
    """Which round of which run, and which phase of it."""

    run_id: str
    number: int
    phase: Phase = "training"

    def __str__(self) -> str:
        what = "round" if self.phase == "training" else "the calibration of round"
        return f"{what} {self.number} of run {self.run_id}"

    def sent(self, seat: Seat) -> RoundAddress:
        """Under which the seat's board knows its work: where merges are asynchronous, it may have been sent
        it some merges ago."""
        return self if seat.version is None else RoundAddress(self.run_id, seat.version + 1, self.phase)

    def staleness(self, seat: Seat) -> int:
        """How many merges are between the model that the seat was sent and the one of this round."""
        return self.number - self.sent(seat).number


@dataclass(frozen=True)
class OpenedRound:
    """What a round's training and its calibration have in common."""

    address: RoundAddress
    state: Literal["open", "committed"]
    opened: float
    deadline: float | None
    """None: it waits as long as it takes."""
    extended: int
    """How often the deadline passed without enough answers."""
    failures: int = field(default=0, kw_only=True)
    """How often its answers could not be merged, whoever was to blame."""
    seats: tuple[Seat, ...]
    """In the order of client numbers."""

    def seats_in(self, state: SeatState) -> list[Seat]:
        return [seat for seat in self.seats if seat.state == state]

    def answers(self) -> list[tuple[Seat, Answer]]:
        """Those who have answered, and what they gave back."""
        return [(seat, seat.answer) for seat in self.seats if seat.answer is not None]


@dataclass(frozen=True)
class TrainingRound(OpenedRound):
    """A round in which clients train."""

    target: int
    """Clients a whole round has; the quorum is a share of it."""
    metrics: Mapping[str, Any]
    """What was measured of the model it made, its calibration included; empty until it is merged."""
    model: bytes | None
    """Hash of the blob of the model it made; None until it is merged, and once that is kept no longer."""


@dataclass(frozen=True)
class CalibrationRound(OpenedRound):
    """Clients measure the statistics of the model that a merged round has made."""

    trained: TrainingRound


Round = TrainingRound | CalibrationRound


@dataclass(frozen=True)
class Commit:
    """What the run gains from a merged round or calibration."""

    round: int
    last: bool
    """Whether the run ends with it; training does not end a run if a calibration is to follow."""
    model: bytes
    """Hash of the blob of the run's model from now on."""
    accuracies: Mapping[int, float]
    """By client, of those that were measured."""
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]
    metrics: Mapping[str, Any]
    """All that is known of the round from now on."""
    keep_models: int
    """How many rounds' models stay, this one's included."""


@dataclass(frozen=True)
class CarriedOver:
    """Asynchronous merges: the next round opens with this one's commit, and those at work go over to it."""

    target: int
    """Changes that make the next version."""
    merged: Collection[int]
    """Clients whose answers are merged; answers that came later count in the next round."""
    dropped: Mapping[int, str]
    """By client: why it is not waited for any more."""


@dataclass(frozen=True)
class TrainingCommit(Commit):
    """What a merged round comes to."""

    ready: bool
    """Whether the model can be handed out; not without the calibration that the run has measured for it."""
    bit_widths: tuple[int, ...]
    records: Sequence[ClientRecord]
    """The clients that were in the round."""
    carried: CarriedOver | None = None
    """None: nobody is left at work, and the next round opens when it can."""


@dataclass(frozen=True)
class CalibrationCommit(Commit):
    """What the calibration of a merged round comes to: the same model with new statistics."""


@dataclass(frozen=True)
class Release:
    """A version of a run's model that boards are to run."""

    version: int
    """1 for the first of the server; runs share the numbers."""
    run_id: str
    round: int
    files: Mapping[str, Collection[str]]
    """SHA-256 in hex of every file that the exporter has verified, by format."""
    state: ReleaseState
    reason: str
    """Why it is in its state."""
    canary: frozenset[str]
    """Ids of the clients that get it first."""
    max_errors: float
    """The share of errors, 0..1, above which it is rolled back."""
    soak: float
    """Seconds for which each client that was offered it must report it as good."""
    created: float
    changed: float
    """When it got its state."""


@dataclass(frozen=True)
class Installation:
    """What a client was offered of a version, and what it has said of it."""

    version: int
    client_id: str
    format: str
    running: bool
    """Whether the client runs it, as far as it has said."""
    offered: float
    ok: int = 0
    errors: int = 0
    reason: str = ""
    """Of its last error."""
    good_since: float | None = None
    """When the first of its reports came that no error has followed; None: the last one told of an error, or
    there is none."""
    reported: float | None = None
    """When the last report came."""


@dataclass(frozen=True)
class ModelReport:
    """What a client says of a version: totals since it has it, so that one told twice counts once."""

    version: int
    format: str
    ok: int
    errors: int
    reason: str
    running: bool
