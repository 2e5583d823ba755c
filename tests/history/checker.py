"""Proves from a history that nothing acknowledged was lost, nothing counted twice, and W follows from facts.

`violations` compares what clients were told (`facts.Told`) with what the store ended with (`facts.Stored`)
and with the run made again (`replay`). It gives a sentence for each of these that does not hold:

receipts      Each is in the store with its id and payload, in a merge or in the round that is open; or its
              client was told afterwards that the round went on without it, or that the run was aborted.
              Whatever is not merged yet is still among the blobs, whole.
counting      No receipt id and no payload stands for two places. A merged payload was sent by the client
              that it counts for, and was not one that this client was told is rejected.
assignments   Each is the seat's: number, seed, bit-widths and payload; or it was cancelled afterwards. The
              payload of every seat is the hash of the model before it, or of the version that the seat says
              it was sent, quantized at its bit-widths.
cancellations Each concerns a seat that was cut, or dealt again, or a run that was aborted.
rounds        They are committed one after the other, without a gap, with nobody left "selected"; the
              store's count of updates is the number of answers.
W             Every model that the store names is the one that the replay computes, to the bit, and its blob
              is whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from fedmpq.exchange.wire import digest
from fedmpq.method.aggregate import MergeError
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.records import ENDED, CalibrationRound, Round, Seat, TrainingRound
from tests.history.facts import First, Line, Place, Stored, Told, place_of, read_told, stored_in
from tests.history.replay import Replay, Step, name_of
from tests.history.slow_merge import slow_weights_differ

Seats = dict[Place, tuple[Round, Seat]]


def violations(told: Told, stored: Stored, first: First) -> list[str]:
    """What does not hold of this history; nothing if all is well."""
    seats = _seats(stored)
    return [
        *_receipts(told, stored, seats),
        *_counting(told, stored, seats),
        *_assignments(told, stored, seats),
        *_cancellations(told, stored, seats),
        *_endings(told, stored),
        *_rounds(stored),
        *_replay(told, stored, first),
    ]


def assert_consistent(histories: Path, state: StateFolder, first: First, name: str | None = None) -> Told:
    """The histories in a folder and the store in a state folder agree; what was told, for more questions."""
    told, stored = read_told(histories), stored_in(state, name)
    assert_holds(told, stored, first)
    return told


def assert_holds(told: Told, stored: Stored, first: First) -> None:
    assert any(told.of("receipt")), "no receipt was recorded: there is nothing to check"
    found = violations(told, stored, first)
    assert not found, f"{len(found)} violations:\n" + "\n".join(found[:20])


def _seats(stored: Stored) -> Seats:
    ids = stored.client_ids
    return {
        Place(ids[seat.client], known.run_id, known.number, known.phase): (each, seat)
        for each in stored.rounds
        for seat in each.seats
        if (known := each.address.sent(seat))
    }


# Receipts


def _receipts(told: Told, stored: Stored, seats: Seats) -> Iterator[str]:
    for line in told.of("receipt"):
        if line["run_id"] == stored.run.run_id and (fault := _lost(line, told, stored, seats)):
            yield f"{place_of(line)}: receipt {line['receipt_id'][:8]} {fault}"


def _lost(line: Line, told: Told, stored: Stored, seats: Seats) -> str | None:
    """What has become of the update that the receipt promised to keep; None: it is kept."""
    place = place_of(line)
    assert place is not None
    each, seat = seats.get(place, (None, None))
    if each is None or seat is None or seat.answer is None:
        if stored.run.state == "aborted" or _let_go_after(line, told.at(place)):
            return None
        return "is of no update in the store"
    if (seat.answer.receipt_id, seat.answer.payload.hex()) != (line["receipt_id"], line["payload"]):
        return None if _let_go_after(line, told.at(place)) else "names another update than the store has"
    if each.state == "open" and stored.run.state not in ENDED:
        data = stored.blobs.get(seat.answer.payload)
        if data is None or digest(data) != seat.answer.payload:
            return "is of an update whose blob is missing or damaged"
    return None


def _let_go_after(line: Line, lines: list[Line]) -> bool:
    """Whether the client was told later that the round goes on without what the receipt was for."""
    later = lines[lines.index(line) + 1 :]
    return any(one["kind"] == "cancelled" for one in later)


# Counting


def _counting(told: Told, stored: Stored, seats: Seats) -> Iterator[str]:
    names, ids = defaultdict[bytes, list[Place]](list), defaultdict[str, list[Place]](list)
    rejected = {
        (place_of(line), line["payload"])
        for line in told.of("refused")
        if line["code"] == "INVALID_ARGUMENT" and "rejected" in line["details"]
    }
    received = {(place_of(line), line["payload"]) for line in told.of("receipt")}
    for place, (_, seat) in seats.items():
        if seat.answer is None:
            continue
        payload = seat.answer.payload
        names[payload].append(place)
        ids[seat.answer.receipt_id].append(place)
        if place.client_id not in told.senders.get(payload, ()):
            yield f"{place}: the update that counts for it, {payload.hex()[:8]}, was never sent by it"
        key = place, payload.hex()
        if key in rejected and key not in received:
            yield f"{place}: {payload.hex()[:8]} counts, and its client was told that it is rejected"
    for payload, places in names.items():
        if len(places) > 1:
            yield f"update {payload.hex()[:8]} counts {len(places)} times: {', '.join(map(str, places))}"
    for receipt_id, places in ids.items():
        if len(places) > 1:
            yield f"receipt {receipt_id[:8]} was given {len(places)} times: {', '.join(map(str, places))}"
    yield from _receipts_of_one_update(told)


def _receipts_of_one_update(told: Told) -> Iterator[str]:
    given = defaultdict[tuple[Place | None, str], set[str]](set)
    for line in told.of("receipt"):
        given[place_of(line), line["payload"]].add(line["receipt_id"])
    for (place, payload), ids in given.items():
        if len(ids) > 1:
            yield f"{place}: update {payload[:8]} has {len(ids)} receipts"


# Assignments and cancellations


def _assignments(told: Told, stored: Stored, seats: Seats) -> Iterator[str]:
    seed = make_seed(stored)
    for line in told.of("assignment"):
        place = place_of(line)
        if place is None or place.run_id != stored.run.run_id:
            continue
        _, seat = seats.get(place, (None, None))
        matches = (
            seat is not None
            and line["client"] == seat.client
            and line["payload"] == seat.payload.hex()
            and line["payload_bytes"] == seat.payload_bytes
            and tuple(line["bit_widths"]) == seat.bit_widths
            and line["seed"] == seed
        )
        if not matches and not _let_go_after(line, told.at(place)):
            yield f"{place}: was assigned {line['payload'][:8]}, which is not what its seat was dealt"


def make_seed(stored: Stored) -> int:
    return int(stored.run.config.get("seed", 0))


def _cancellations(told: Told, stored: Stored, seats: Seats) -> Iterator[str]:
    for line in told.of("cancelled"):
        place = place_of(line)
        if place is None or place.run_id != stored.run.run_id:
            continue
        _, seat = seats.get(place, (None, None))
        if seat is None or seat.state in ("cut", "rejected") or stored.run.state == "aborted":
            continue
        lines = told.at(place)
        later = lines[lines.index(line) + 1 :]
        if not any(one["kind"] == "assignment" for one in later):
            yield f"{place}: was told that the round goes on without it, and is {seat.state} in the store"


def _endings(told: Told, stored: Stored) -> Iterator[str]:
    for line in told.of("run_ended"):
        if line["run_id"] == stored.run.run_id and line["state"] != stored.run.state:
            said = f"client {line['client_id'][:8]} was told that the run is {line['state']}"
            yield f"{said}; it is {stored.run.state}"


# Rounds and W


def _rounds(stored: Stored) -> Iterator[str]:
    numbers = [each.address.number for each in stored.rounds if isinstance(each, TrainingRound)]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"the store has rounds {numbers}"
    merged = [one for one in stored.rounds if isinstance(one, TrainingRound) and one.state == "committed"]
    if len(merged) != stored.run.round:
        yield f"{len(merged)} rounds are committed; the run says that {stored.run.round} are"
    for each in stored.rounds[:-1]:
        if each.state != "committed":
            yield f"{each.address} is open, and a later one exists"
    for each in stored.rounds:
        if each.state == "committed":
            yield from _committed(each)


def _committed(each: Round) -> Iterator[str]:
    answers = len(each.answers())
    if not answers:
        yield f"{each.address} was merged from nothing"
    if waiting := each.seats_in("selected"):
        yield f"{each.address} is committed, and {len(waiting)} clients are still selected in it"
    for seat in each.seats:
        if (seat.answer is not None) != (seat.state == "updated"):
            yield f"{each.address}: client {seat.client} is {seat.state} with an answer: {seat.answer}"
    if isinstance(each, TrainingRound) and each.metrics.get("updates") != answers:
        counted = each.metrics.get("updates")
        yield f"{each.address} says that it merged {counted} updates; the store has {answers}"


def _replay(told: Told, stored: Stored, first: First) -> Iterator[str]:
    replay = Replay(first, stored, told.payloads)
    calibrated = {
        each.address.number
        for each in stored.rounds
        if isinstance(each, CalibrationRound) and each.state == "committed"
    }
    expected = digest(first.model)
    try:
        for step in replay.steps():
            yield from _step(step, replay)
            if step.round.state != "committed":
                continue
            expected = name_of(step.model)
            trained = isinstance(step.round, TrainingRound)
            kept = step.round.model if isinstance(step.round, TrainingRound) else step.round.trained.model
            is_last = not trained or step.round.address.number not in calibrated
            if is_last and kept not in (None, expected):
                yield f"{step.round.address}: its model is {kept.hex()[:8]}, not {expected.hex()[:8]}"
    except KeyError as missing:
        yield f"an update that was merged was sent by nobody whole: {bytes(missing.args[0]).hex()[:8]}"
        return
    except MergeError as error:
        yield f"the stored rounds cannot be merged again: {error}"
        return
    if stored.run.model != expected:
        yield f"W is {stored.run.model.hex()[:8]}; the updates of all rounds make {expected.hex()[:8]}"
    yield from _kept(stored)


def _step(step: Step, replay: Replay) -> Iterator[str]:
    each = step.round
    for seat in each.seats:
        if step.payloads[seat.client] != seat.payload:
            yield f"{each.address}: client {seat.client} was sent another model than W at its bit-widths"
    # Another merge than the product's has another formula.
    own = type(replay.method).merge is not QuantizedMethod.merge
    if step.updates and not own and slow_weights_differ(replay, step):
        yield f"{each.address}: the method's merge is not what its formula gives"


def _kept(stored: Stored) -> Iterator[str]:
    """Every model the store names is among its blobs, whole."""
    trained = [each for each in stored.rounds if isinstance(each, TrainingRound)]
    named = {stored.run.graph, stored.run.model, *(each.model for each in trained if each.model is not None)}
    for name in named:
        data = stored.blobs.get(name)
        if data is None or digest(data) != name:
            yield f"blob {name.hex()[:8]} is {'missing' if data is None else 'damaged'}"
