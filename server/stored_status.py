"""The status of a server as far as the store knows it: all but who is connected, and how far they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED, LEFT, Client, Member, Round, Run, Sighting, TrainingRound


def stored_status(store: Store) -> pb.ServerStatus:
    """The run that has not ended, or else the newest, and every client that has enrolled."""
    clients = store.list_clients()
    run = store.next_run() or next(iter(store.list_runs()), None)
    opened = None if run is None else _opened(store, run)
    parts = {} if run is None else {member.client_id: member for member in store.members(run.run_id)}
    rows = [client_status(client, parts.get(client.client_id), opened) for client in clients]
    seen = store.sightings()
    for row in rows:
        if (sighting := seen.get(row.client_id)) is not None:
            add_sighting(row, sighting)
    return pb.ServerStatus(run=None if run is None else stored_run(store, run), clients=rows)


def add_sighting(status: pb.ClientStatus, seen: Sighting) -> None:
    """When the client was last connected, and what it showed then; what it did not show stays as it is."""
    status.last_seen.CopyFrom(timestamp(seen.last_seen))
    if seen.certificate_ends is not None:
        status.certificate_ends.CopyFrom(timestamp(seen.certificate_ends))
    if seen.free_bytes is not None:
        status.free_bytes = seen.free_bytes


def stored_run(store: Store, run: Run) -> pb.RunStatus:
    last = store.round(run.run_id, run.round) if run.round else None
    return run_status(run, _opened(store, run), last)


def _opened(store: Store, run: Run) -> Round | None:
    """The round at work: one that an aborted run left open is none."""
    return None if run.state in ENDED else store.current_round(run.run_id)


def run_status(run: Run, opened: Round | None, last: TrainingRound | None) -> pb.RunStatus:
    """`opened` is the round that is open, `last` the one merged last."""
    status = pb.RunStatus(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        reason=run.reason,
        round=run.round,
        rounds=run.config["rounds"],
        bytes_up=run.bytes_up,
        bytes_down=run.bytes_down,
        created=timestamp(run.created),
    )
    if run.ended is not None:
        status.ended.CopyFrom(timestamp(run.ended))
    if opened is not None:
        status.selected = sum(seat.state not in LEFT for seat in opened.seats)
        status.updates = len(opened.seats_in("updated"))
        status.phase = opened.address.phase
        if run.config.get("asynchronous") and isinstance(opened, TrainingRound):
            status.wanted = opened.target
        status.opened.CopyFrom(timestamp(opened.opened))
        if opened.deadline is not None:
            status.deadline.CopyFrom(timestamp(opened.deadline))
    if last is not None:
        status.metrics.CopyFrom(round_metrics(last.metrics))
    return status


def round_metrics(metrics: Mapping[str, Any]) -> pb.RoundMetrics:
    """What the store keeps of a round has the names of the message's fields; others are skipped."""
    known = {field.name for field in pb.RoundMetrics.DESCRIPTOR.fields}
    values = {name: value for name, value in metrics.items() if name in known and value is not None}
    values["bit_widths"] = bytes(values.get("bit_widths", ()))
    return pb.RoundMetrics(**values)


def client_status(client: Client, member: Member | None, opened: Round | None) -> pb.ClientStatus:
    """`member` is its part in the run, if it has one, `opened` the run's open round."""
    status = pb.ClientStatus(
        client_id=client.client_id,
        name=client.name,
        client=-1,
        budget=client.budget,
        samples=client.samples,
        version=client.version,
        engine=client.engine,
        max_samples=client.limits.max_samples,
        max_budget=client.limits.max_budget,
    )
    if member is None:
        return status
    status.client, status.bytes_up, status.bytes_down = member.client, member.bytes_up, member.bytes_down
    status.bit_widths = bytes(member.record.dealt or ())
    if member.accuracy is not None:
        status.accuracy = member.accuracy
    seat = next((seat for seat in opened.seats if seat.client == member.client), None) if opened else None
    if seat is not None:
        status.state, status.bit_widths = seat.state, bytes(seat.bit_widths)
        status.reason = seat.reason
        status.staleness = opened.address.staleness(seat) if opened else 0
    return status


def timestamp(seconds: float) -> Timestamp:
    moment = Timestamp()
    moment.FromNanoseconds(round(seconds * 1e6) * 1000)
    return moment
