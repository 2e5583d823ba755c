"""The checker finds every fault that is put into a good history, and none in a good one.

The history is of a real server: six rounds with calibrations, a client that lies, one that is too slow, and
a round that is still open with one update acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from fedmpq.exchange.messages import Update
from fedmpq.exchange.wire import decode_update, encode_update
from fedmpq.method.archive import Tensors, pack_model
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.store.records import Answer, Round, Seat, TrainingRound
from tests.history.checker import violations
from tests.history.facts import First, Line, Stored, Told, read_stored, read_told
from tests.history.recording import Recorder
from tests.history.replay import Replay
from tests.history.slow_merge import slow_weights_differ
from tests.server.loopback import federation, run_all, small_config
from tests.server.small_model import GRAPH, first_state
from tests.server.stand_in import StandIn, nudge

MERGED = 6


@dataclass
class History:
    told: Told
    stored: Stored
    first: First

    def violations(self) -> list[str]:
        return violations(self.told, self.stored, self.first)

    def line(self, kind: str, **facts: Any) -> Line:
        return next(one for one in self.told.of(kind) if facts.items() <= one.items())

    def change_round(self, index: int, changed: Round) -> None:
        rounds = list(self.stored.rounds)
        rounds[index] = changed
        self.stored = replace(self.stored, rounds=tuple(rounds))

    def change_seat(self, index: int, change: Callable[[Seat], Seat], state: str = "updated") -> Seat:
        """Changes the first seat in that state of the round at the index; gives what it was."""
        each = self.stored.rounds[index]
        old = next(seat for seat in each.seats if seat.state == state)
        seats = tuple(change(seat) if seat is old else seat for seat in each.seats)
        self.change_round(index, replace(each, seats=seats))
        return old


def lie(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    """An update of somebody else."""
    return replace(nudge(graph, assignment, payload, samples), client=assignment.client + 1)


class Silent(StandIn):
    """Answers nothing once so many rounds are merged."""

    async def work(self, assignment: pb.Assignment) -> None:
        if assignment.round <= MERGED:
            await super().work(assignment)


class Late(Silent):
    """Comes when enough others were faster."""

    async def work(self, assignment: pb.Assignment) -> None:
        await asyncio.sleep(0.3)
        await super().work(assignment)


class Liar(StandIn):
    async def work(self, assignment: pb.Assignment) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await super().work(assignment)


async def recorded(folder: Path) -> History:
    async with federation(folder) as server:
        server.queue(small_config(rounds=MERGED + 1, clients_per_round=2, over_selection=0.5))
        kinds: list[tuple[type[StandIn], dict[str, Any]]] = [(StandIn, {}), (Silent, {}), (Late, {})]
        kinds.append((Liar, {"train": lie}))
        token, clients = server.token(uses=None), list[StandIn]()
        for number, (kind, more) in enumerate(kinds):
            recorder = Recorder(server.histories / f"{number}.jsonl")
            clients.append(kind(server.address, f"c-{number}", 2.0 + number, recorder=recorder, **more))
            await clients[-1].enrol(token)
        running = [asyncio.create_task(client.run()) for client in clients]
        await server.until(lambda: MERGED + 1 in clients[0].receipts)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        stored = await asyncio.to_thread(read_stored, server.store, folder / "blobs")
        for client in clients:
            await client.close()
        weights, side = first_state()
        first = First(GRAPH.to_bytes(), pack_model(Tensors(weights, side)))
        return History(read_told(server.histories), stored, first)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> History:
    return asyncio.run(recorded(tmp_path_factory.mktemp("history")))


@pytest.fixture
def history(good: History) -> History:
    """One to put faults into."""
    return History(copy.deepcopy(good.told), good.stored, good.first)


def test_a_good_history_holds(good: History) -> None:
    assert good.violations() == []
    states = {seat.state for each in good.stored.rounds for seat in each.seats}
    assert states == {"selected", "updated", "rejected", "cut"}, "the history has something of everything"
    assert any(good.told.of("cancelled"))
    assert any(line["code"] == "INVALID_ARGUMENT" for line in good.told.of("refused"))
    assert good.stored.rounds[-1].state == "open"
    assert len(good.stored.rounds[-1].answers()) == 1


# Each puts one fault into the history, and names what the checker says to it.


def lose_an_update(history: History) -> str:
    history.change_seat(0, lambda seat: replace(seat, state="cut", reason="forgotten", answer=None))
    return "is of no update in the store"


def lose_a_round(history: History) -> str:
    history.stored = replace(history.stored, rounds=history.stored.rounds[:-1])
    return "is of no update in the store"


def replace_an_update(history: History) -> str:
    history.change_seat(0, lambda seat: replace(seat, answer=Answer(b"x" * 32, 7, "another")))
    return "names another update than the store has"


def lose_the_blob_of_an_acknowledged_update(history: History) -> str:
    _, answer = history.stored.rounds[-1].answers()[0]
    history.stored = replace(history.stored, blobs={**history.stored.blobs, answer.payload: b""})
    return "is of an update whose blob is missing or damaged"


def count_an_update_twice(history: History) -> str:
    answer = history.stored.rounds[0].answers()[0][1]
    history.change_seat(2, lambda seat: replace(seat, answer=answer))
    return "counts 2 times"


def count_what_nobody_sent(history: History) -> str:
    del history.told.senders[history.stored.rounds[0].answers()[0][1].payload]
    return "was never sent by it"


def count_what_was_rejected(history: History) -> str:
    receipt = history.line("receipt", phase="training", round=1)
    lines = history.told.lines[receipt["client_id"]]
    refusal = {"kind": "refused", "code": "INVALID_ARGUMENT", "details": "the update was rejected: no"}
    lines[lines.index(receipt)] = {**receipt, **refusal}
    return "was told that it is rejected"


def give_two_receipts(history: History) -> str:
    receipt = history.line("receipt")
    lines = history.told.lines[receipt["client_id"]]
    lines.append({**receipt, "receipt_id": "f" * 32})
    return "has 2 receipts"


def assign_another_model(history: History) -> str:
    history.line("assignment", round=1)["payload"] = "00" * 32
    return "which is not what its seat was dealt"


def assign_other_bits(history: History) -> str:
    history.line("assignment", round=1)["bit_widths"][0] += 1
    return "which is not what its seat was dealt"


def deal_another_model(history: History) -> str:
    history.change_seat(0, lambda seat: replace(seat, payload=b"p" * 32))
    return "was sent another model than W"


def cancel_what_counts(history: History) -> str:
    receipt = history.line("receipt", round=1)
    cancelled = {name: receipt[name] for name in ("client_id", "run_id", "round", "phase")}
    history.told.lines[receipt["client_id"]].append({"kind": "cancelled", **cancelled, "reason": "late"})
    return "was told that the round goes on without it"


def end_otherwise(history: History) -> str:
    line = history.line("receipt")
    ended = {
        "kind": "run_ended",
        "client_id": line["client_id"],
        "run_id": line["run_id"],
        "state": "aborted",
    }
    history.told.lines[line["client_id"]].append(ended)
    return "was told that the run is aborted; it is running"


def skip_a_round(history: History) -> str:
    rounds = history.stored.rounds
    history.stored = replace(history.stored, rounds=tuple(r for r in rounds if r.address.number != 2))
    return "the store has rounds"


def forget_to_wait(history: History) -> str:
    history.change_seat(0, lambda seat: replace(seat, state="selected", answer=None))
    return "are still selected in it"


def count_wrongly(history: History) -> str:
    first = history.stored.rounds[0]
    assert isinstance(first, TrainingRound)
    history.change_round(0, replace(first, metrics={**first.metrics, "updates": 3}))
    return "says that it merged 3 updates"


def merge_another_update(history: History) -> str:
    """The store says that an update was merged, and W was made with another weight of it."""
    name = history.stored.rounds[0].answers()[0][1].payload
    run_id, update = decode_update(GRAPH, history.told.payloads[name])
    lighter = replace(update, samples=update.samples // 2)
    history.told.payloads[name] = encode_update(GRAPH, run_id, lighter)
    return "the updates of all rounds make"


def keep_another_model(history: History) -> str:
    run = replace(history.stored.run, model=history.stored.run.graph)
    history.stored = replace(history.stored, run=run)
    return "the updates of all rounds make"


def lose_the_model(history: History) -> str:
    blobs = {name: data for name, data in history.stored.blobs.items() if name != history.stored.run.model}
    history.stored = replace(history.stored, blobs=blobs)
    return "is missing"


def damage_the_graph(history: History) -> str:
    history.stored = replace(history.stored, blobs={**history.stored.blobs, history.stored.run.graph: b"x"})
    return "is damaged"


def lose_the_only_copy(history: History) -> str:
    del history.told.payloads[history.stored.rounds[0].answers()[0][1].payload]
    return "was sent by nobody whole"


FAULTS = (
    *(lose_an_update, lose_a_round, replace_an_update, lose_the_blob_of_an_acknowledged_update),
    *(count_an_update_twice, count_what_nobody_sent, count_what_was_rejected, give_two_receipts),
    *(assign_another_model, assign_other_bits, deal_another_model, cancel_what_counts, end_otherwise),
    *(skip_a_round, forget_to_wait, count_wrongly, merge_another_update, keep_another_model),
    *(lose_the_model, damage_the_graph, lose_the_only_copy),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[History], str], history: History) -> None:
    expected = fault(history)
    found = history.violations()
    assert any(expected in one for one in found), found


@pytest.mark.parametrize("settings", [{}, {"profile": "paper"}, {"merge": "deltas", "profile": "paper"}])
def test_the_slow_reference_agrees_and_can_disagree(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Of every way to merge: the method is what the formulas give, and a merge off by a little is not."""

    async def scenario() -> History:
        async with federation(tmp_path) as server:
            server.queue(small_config(rounds=2, **settings))
            await run_all(await server.clients(3, 8))
            stored = await asyncio.to_thread(read_stored, server.store, tmp_path / "blobs")
            weights, side = first_state()
            first = First(GRAPH.to_bytes(), pack_model(Tensors(weights, side)))
            return History(read_told(server.histories), stored, first)

    history = asyncio.run(scenario())
    replay = Replay(history.first, history.stored, history.told.payloads)
    trained = [step for step in replay.steps() if step.updates]
    assert len(trained) == 2
    for step in trained:
        assert not slow_weights_differ(replay, step)
        off = {name: (w + np.float32(0.001)).astype(np.float32) for name, w in step.model.weights.items()}
        assert slow_weights_differ(replay, replace(step, model=replace(step.model, weights=off)))
