"""What the server asks of its store, in the words of the domain. Each method is one transaction.

What a method returned has happened for good. Recovery after a crash is reading these facts again. Methods
block and may be called from any thread. They raise `StoreError` for what the facts do not allow, and
`StoreFailed` if the store cannot be reached or written to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import (
    Answered,
    CalibrationCommit,
    CalibrationRound,
    Client,
    Described,
    Forwarded,
    FrontEnd,
    Installation,
    Leader,
    Member,
    ModelReport,
    Present,
    Release,
    Round,
    RoundAddress,
    Run,
    Seat,
    Sighting,
    ThrownOut,
    TrainingCommit,
    TrainingRound,
    UploadPart,
)
from fedmpq.server.tokens import TokenRecord


class Enrolment(Protocol):
    """Tokens, and the clients that enrolled with them."""

    def add_token(self, token: TokenRecord) -> None: ...

    def revoke_token(self, token_id: str, now: float) -> bool:
        """No one can enrol with it any more; those who did stay. False: there is no such token."""

    def list_tokens(self) -> list[TokenRecord]:
        """The oldest first."""

    def enrol(
        self,
        token_hash: bytes,
        name: str,
        budget: float,
        version: str,
        secret_hash: bytes,
        certificate_name: str | None,
        now: float,
    ) -> str:
        """The id of a new client, at the cost of one use of the token.

        The same token and name again, before any call with the identity given, replaces that identity's
        secret and costs nothing: the answer was lost on its way.
        """

    def client_by_id(self, client_id: str) -> Client | None:
        """A client that may call: None if there is none of this id, or it was revoked."""

    def clients_by_id(self, client_ids: Collection[str]) -> dict[str, Client]:
        """Those of the clients that may call, by id."""

    def unrevoked(self, client_ids: Collection[str]) -> dict[str, ClaimLimits]:
        """Those of the clients that may still call, each with what it may claim now."""

    def limit_client(self, name: str, limits: ClaimLimits) -> bool:
        """From the next round on its claims count within these; False: no client has this name."""

    def rename_client(self, name: str, wanted: str) -> bool:
        """Whether there was such a client; `NameTaken` if another one is called so."""

    def list_clients(self, *, revoked: bool = False) -> list[Client]:
        """By name; the revoked ones too if asked for."""

    def revoke_client(self, name: str, now: float) -> str | None:
        """Ends an identity and frees its name; its id, or None if no client has this name."""

    def mark_seen(self, client_ids: Collection[str], now: float) -> None:
        """The clients have used their identities: their enrolments are complete."""

    def describe_clients(self, described: Sequence[Described], now: float) -> list[Client]:
        """The clients with what they say of themselves on a new stream, in their order; nothing is written of
        those that are as before."""


class Runs(Protocol):
    """Runs, in the order they were queued, and who is in them."""

    def queue_run(
        self,
        name: str,
        config: Mapping[str, Any],
        class_names: Sequence[str],
        graph: bytes,
        model: bytes,
        now: float,
    ) -> Run:
        """A run that waits for its turn; `graph` and `model` are hashes of blobs that are durable already."""

    def run(self, run_id: str) -> Run:
        """The run of that id, or UnknownRun."""

    def run_by_name(self, name: str) -> Run | None: ...

    def list_runs(self) -> list[Run]:
        """The newest first."""

    def next_run(self) -> Run | None:
        """The oldest run that has not ended: the one at work, or the next."""

    def last_ended(self) -> Run | None:
        """The run that ended last."""

    def pause_run(self, run_id: str, reason: str = ...) -> Run:
        """The run waits until it is resumed; a run that is paused already gets another reason, unless it is
        the operator who asks."""

    def resume_run(self, run_id: str) -> Run:
        """Back to where it was paused."""

    def abort_run(self, run_id: str, reason: str, now: float) -> Run:
        """Ends a run; what was merged stays."""

    def configure_run(self, run_id: str, known: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
        """The run has other settings; a finished one that is to have more rounds goes on.

        StoreError if its settings are no longer those that were `known`, or it was aborted.
        """

    def members(self, run_id: str) -> list[Member]:
        """In the order of their numbers."""

    def latest_part(self, client_id: str) -> tuple[Run, int] | None:
        """The newest run with a model to hand out that the client is in, and its number there."""


class Rounds(Protocol):
    """The rounds of runs and their calibrations; a run has one of them open at most."""

    def open_round(
        self,
        run_id: str,
        number: int,
        *,
        target: int,
        deadline: float | None,
        bit_widths: Sequence[int],
        members: Iterable[Member],
        seats: Sequence[Seat],
        now: float,
    ) -> TrainingRound:
        """Round `number` begins: who is in it, with which bit-widths.

        `members` are those who join the run, and those who were dealt to, with what they say of themselves
        now. `bit_widths` are the run's; its first round gives it some.
        """

    def open_calibration(
        self, run_id: str, number: int, *, deadline: float | None, seats: Sequence[Seat], now: float
    ) -> CalibrationRound:
        """The calibration of round `number`, the last one merged, begins: who measures which model."""

    def reopen_round(
        self,
        address: RoundAddress,
        *,
        deadline: float | None,
        extended: bool,
        cut: Iterable[int],
        reason: str,
        members: Iterable[Member],
        seats: Sequence[Seat],
    ) -> Round:
        """The open round goes on with others: `cut` leave it for that reason, `seats` enter it, perhaps
        for the second time."""

    def close_round(self, address: RoundAddress, reason: str) -> Round:
        """From here on the round takes no answer; those who have not given one are cut.

        The answers it has are those to merge.
        """

    def current_round(self, run_id: str) -> Round | None:
        """The round or calibration that is open, if one is."""

    def round(self, run_id: str, number: int) -> TrainingRound:
        """A round's training, open or merged, or UnknownRound."""

    def last_metrics(self, run_id: str, count: int) -> list[dict[str, Any]]:
        """What was measured of so many of the last merged rounds, the newest first."""

    def calibration(self, run_id: str, number: int) -> CalibrationRound | None:
        """A round's calibration, if it has had one."""

    def seat_of(self, address: RoundAddress, client_id: str) -> Seat | None:
        """The client's place in a round, open or not; where merges are asynchronous, the place that was sent
        its work in that round, in whichever it is now."""

    def add_answers(self, address: RoundAddress, answers: Sequence[Answered]) -> list[str | UpdateRefused]:
        """The receipts of updates or calibrations whose blobs are durable, in their order, in one
        transaction; the same receipt for the same answer again, and why one is taken no more."""

    def reject_answer(self, address: RoundAddress, client: int, reason: str) -> bool:
        """What the client sent was bad: it is out of this round and has a strike. False: it was out."""

    def decline(self, address: RoundAddress, client: int, reason: str) -> bool:
        """The client cannot take part: its place in this round is free. False: it has none to give up."""

    def commit_round(self, run_id: str, result: TrainingCommit, now: float) -> Run:
        """The round is merged: the new model, bit-widths, client records and metrics, all or nothing. With
        those that are carried over, the next one is open."""

    def commit_calibration(self, run_id: str, result: CalibrationCommit, now: float) -> Run:
        """The round's model has its statistics: model, metrics and perhaps the run's end, all or nothing."""


class FailedMerges(Protocol):
    """Answers that had their receipts and do not count after all, or not yet."""

    def throw_out(self, address: RoundAddress, clients: Iterable[int], reason: str, now: float) -> Round:
        """The answers of these clients kept the open round from being merged: they are rejected after the
        fact, with a strike for each."""

    def do_anew(self, address: RoundAddress, reason: str, deadline: float | None, now: float) -> Round:
        """The open round could not be merged and nobody was found to blame: no answer of it counts, and
        the places of those who gave them are free again."""

    def ask_again(self, address: RoundAddress, client: int, reason: str, deadline: float | None) -> Round:
        """The server has lost the client's answer: its place waits for it once more, and the same answer has
        the same receipt."""

    def undo(self, calibration: RoundAddress, reason: str, last: bool, now: float) -> Run:
        """The open calibration shows that the model is not worth keeping: the run has its last model that was
        handed out again, and what was trained since does not count. The rounds keep their numbers."""

    def thrown_out(self, run_id: str) -> list[ThrownOut]:
        """All of the run, the first one first."""


class Releases(Protocol):
    """Versions of models that boards are to run, who was offered them, and what boards say of them."""

    def add_release(
        self,
        run_id: str,
        number: int,
        files: Mapping[str, Collection[str]],
        share: float,
        max_errors: float,
        soak: float,
        now: float,
    ) -> Release:
        """The next version: the model of round `number`, first for that share of the run's clients, one of
        them at least. StoreError while another version of the run is in its canary."""

    def list_releases(self) -> list[Release]:
        """The newest first."""

    def release(self, version: int) -> Release:
        """The version, or UnknownRelease."""

    def release_for(self, client_id: str) -> tuple[Release, int] | None:
        """The version that the client is to have and its number in the run; None: no run of the client has
        versions. NoVersion if they do and none is for this client now."""

    def offer_release(self, client_id: str, version: int, wanted: str, now: float) -> None:
        """The client is offered the version in that format; nothing changes if it was before."""

    def report_model(self, client_id: str, report: ModelReport, now: float) -> Release | None:
        """What a client says of a version that it was offered, or UnknownRelease. The version if that has
        rolled it back or made it the one for every client."""

    def roll_back(self, run_id: str, reason: str, now: float) -> Release:
        """The run's canary, or else its full version, is taken back; in place of a full one the one before
        it is for every client again."""

    def installations(self) -> list[Installation]:
        """All there are, the newest versions first."""

    def pin(self, client_id: str, version: int) -> None:
        """The client has that version, of a run it is in, until it is unpinned."""

    def unpin(self, client_id: str) -> bool:
        """False: it was not pinned."""

    def pins(self) -> dict[str, int]:
        """Versions by the clients that are pinned to them."""

    def released_rounds(self, run_id: str) -> set[int]:
        """Rounds whose model files stay: of the canary, the full version, the one before it and pinned
        ones."""


class Sightings(Protocol):
    """When each board was last connected."""

    def note_sightings(self, found: Iterable[Sighting]) -> None:
        """All at once; each takes the place of its client's last."""

    def sightings(self) -> dict[str, Sighting]:
        """By client."""


class Leadership(Protocol):
    """Which of the servers on one database leads."""

    def lead(self, holder: str, seconds: float) -> int | None:
        """Begin to lead for so many seconds, unless another holder does: the epoch, or None.

        From then on every write of this store is refused (`Deposed`) once somebody else leads. The same
        holder begins anew at once: it knows that what led under its name before is gone.
        """

    def renew(self, seconds: float) -> None:
        """Lead for so many seconds from now on; `Deposed` if another does."""

    def step_down(self) -> None:
        """Lead no longer, so that another need not wait."""

    def leader(self) -> Leader | None:
        """None: nobody has led."""


class Fronts(Protocol):
    """Front-ends, the boards at them, and pieces of uploads that any of them goes on with.

    None of these writes asks who leads, but for `keep_uploads_of`, which is the leader's.
    """

    def beat(self, front_id: str, address: str, seconds: float) -> bool:
        """The front-end is there, for so many seconds at least; whether the store knew nothing of it."""

    def front_ends(self) -> list[FrontEnd]:
        """Those that are gone, too, until they are removed."""

    def note_presence(
        self, front_id: str, come: Sequence[Present], changed: Sequence[Present], gone: Collection[str]
    ) -> None:
        """The first have opened streams at the front-end, whoever had them before. Of the others something
        has changed, or their streams are over: neither matters for one that another front-end has by now."""

    def presence(self, front_id: str, since: int) -> list[Present]:
        """What has changed of the front-end's boards after its version `since`."""

    def boards_at(self, front_id: str) -> set[str]:
        """Whose newest streams the front-end has."""

    def remove_front(self, front_id: str) -> None:
        """It and its boards are gone."""

    def forward(self, one: Forwarded) -> None:
        """For the front-end that has the board's stream."""

    def take_forwarded(self, front_id: str) -> list[Forwarded]:
        """What boards of this front-end said elsewhere, the first of it first; each is taken once."""

    def upload_parts(self, client_id: str, payload: bytes) -> list[UploadPart]:
        """The pieces of an upload from its beginning on, as far as there is no gap."""

    def add_upload_part(self, client_id: str, payload: bytes, part: UploadPart) -> None:
        """A piece whose blob is durable."""

    def forget_upload(self, client_id: str, payload: bytes, beyond: int = 0) -> None:
        """The pieces that reach beyond that byte."""

    def forget_other_uploads(self, client_id: str, payload: bytes) -> None:
        """The pieces of all uploads of the client but this one."""

    def keep_uploads_of(self, client_ids: Collection[str]) -> None:
        """Pieces of other clients' uploads are needed no more."""


class OwnFacts(Protocol):
    """What the store knows of itself and of the blobs that belong to it."""

    def fact(self, name: str) -> str | None:
        """What was remembered under that name."""

    def remember(self, **values: str) -> None: ...

    def record_blobs(self, names: Sequence[bytes]) -> None:
        """Blobs of these names are about to be put."""

    def recorded_blobs(self) -> set[bytes]:
        """Those that were put by this store and not forgotten."""

    def forget_blobs(self, names: Iterable[bytes]) -> None:
        """Blobs that are deleted."""


class Store(
    Enrolment, Runs, Rounds, FailedMerges, Releases, Sightings, Leadership, Fronts, OwnFacts, Protocol
):
    """All the facts of one server."""

    wrote: Callable[[], None] | None
    """Called after a transaction of the leader's; None: nobody asks."""

    @property
    def failure(self) -> str:
        """Why it cannot be reached or written to now; empty: it can."""

    def blobs_in_use(self) -> set[bytes]:
        """Hashes of all blobs that a stored fact refers to; the others may go."""

    def close(self) -> None: ...
