"""What clients are told of runs and rounds, as messages on their event streams."""

from __future__ import annotations

from fedmpq.exchange.wire import phase_to_message, plan_to_message
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.active_run import ActiveRun
from fedmpq.server.round_work import RoundWork
from fedmpq.server.store.records import RoundAddress, Run, Seat


def run_described(active: ActiveRun) -> pb.Event:
    """What a client must know of a run before it gets work of it."""
    codes = active.value_range
    return pb.Event(
        run=pb.RunDescription(
            run_id=active.run.run_id,
            name=active.run.name,
            graph_id=active.run.graph,
            graph_bytes=len(active.graph_bytes),
            class_names=active.run.class_names,
            rounds=active.config.rounds,
            plan=plan_to_message(active.method.recipe.plan_of(active.next_round)),
            low=() if codes is None else codes.low,
            high=() if codes is None else codes.high,
        )
    )


def work_assigned(work: RoundWork, seat: Seat, seconds_left: float) -> pb.Event:
    """The seat's work; 0 seconds left: there is no deadline."""
    active, address = work.active, work.address.sent(seat)
    own = seat.payload, seat.payload_bytes
    plain = work.plain_payload(seat)
    payload, payload_bytes = plain or own
    coded_payload, coded_bytes = own if plain else (b"", 0)
    return pb.Event(
        assignment=pb.Assignment(
            run_id=address.run_id,
            round=address.number,
            client=seat.client,
            seed=active.config.seed,
            payload=payload,
            payload_bytes=payload_bytes,
            coded_payload=coded_payload,
            coded_bytes=coded_bytes,
            reads_coded=True,
            plan=plan_to_message(active.method.recipe.plan_of(address.number)),
            seconds_left=seconds_left,
            evaluate=work.evaluates,
            bit_widths=bytes(seat.bit_widths),
            phase=phase_to_message(address.phase),
        )
    )


def work_cancelled(address: RoundAddress, reason: str) -> pb.Event:
    """The round goes on, or ends, without the client."""
    return pb.Event(
        cancelled=pb.Cancelled(
            run_id=address.run_id,
            round=address.number,
            reason=reason,
            phase=phase_to_message(address.phase),
        )
    )


def run_ended(run: Run) -> pb.Event:
    return pb.Event(run_ended=pb.RunEnded(run_id=run.run_id, state=run.state))
