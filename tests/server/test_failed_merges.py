"""Answers that were accepted and cannot be merged: the round goes on without them, and the server goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Calibration, Evaluation, Update
from fedmpq.method.evaluation import deployed_scores
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server import round_facts
from fedmpq.server.merge_failures import find_offenders
from tests.server.loopback import (
    PATIENCE,
    Federation,
    close_all,
    expected_model,
    federation,
    run_all,
    same_model,
    small_config,
)
from tests.server.own_methods import BAD, Picky, Tainting
from tests.server.stand_in import Measure, made_up, nudge

PICKY = "tests.server.own_methods:Picky"
TAINTING = "tests.server.own_methods:Tainting"


def unmergeable(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    return replace(nudge(graph, assignment, payload, samples), loss=BAD)


def bad_in_round_2(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    chosen = unmergeable if assignment.round == 2 else nudge
    return chosen(graph, assignment, payload, samples)


def swollen(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    """Every round the side tensors grow by as much as the server lets pass."""
    honest = nudge(graph, assignment, payload, samples)
    factors = {"weight": 30, "bias": 30, "clip": 15}
    with np.errstate(over="ignore"):
        side = {
            name: np.asarray(tensor * np.float32(factors.get(name.rpartition(".")[2], 1)), np.float32)
            for name, tensor in honest.side.items()
        }
    return replace(honest, side=side)


def test_the_senders_of_what_cannot_be_merged_are_struck_and_the_rest_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(
                clients_per_round=4, quorum=0.5, rounds=1, method=PICKY, calibration_seconds=60
            )
            run = server.queue(config)
            clients = await server.clients(2, 4, 6, 8)
            for bad in clients[1:3]:
                bad.train = unmergeable
            assert await run_all(clients) == ["finished"] * 4
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "rejected", "rejected", "updated"]
            assert "a scale is not finite" in stored.seats[1].reason
            assert [member.strikes for member in server.store.members(run.run_id)] == [0, 1, 1, 0]
            gone = server.store.thrown_out(run.run_id)
            assert [(one.client, one.struck) for one in gone] == [(1, True), (2, True)]
            assert [one.receipt_id for one in gone] == [c.receipts[1].receipt_id for c in clients[1:3]]
            assert all(1 in client.cancelled for client in clients[1:3]), "they were told"
            assert clients[0].cancelled == []
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await clients[1].stub.GetUpload(
                    pb.GetUploadRequest(run_id=run.run_id, round=1, payload=gone[0].payload),
                    metadata=clients[1].metadata,
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await close_all(clients)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["paper", "best"])
def test_side_tensors_that_grow_every_round_do_not_end_the_server(tmp_path: Path, profile: str) -> None:
    """Nor does a restart in the middle of it."""
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "test.npz", x_test=images, y_test=np.arange(20) % 5)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(
                small_config(
                    clients_per_round=3,
                    quorum=0.5,
                    rounds=14,
                    profile=profile,
                    calibration_seconds=60,
                    test_data=str(tmp_path / "test.npz"),
                )
            )
            clients = await server.clients(4, 4, 8, 8)
            clients[1].train = swollen
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: server.store.run(run.run_id).round >= 5)
            await server.crash()
            await server.start()
            await until_over_or_paused(server, run.run_id)
            ended = server.store.run(run.run_id)
            assert ended.state == "finished" or "could not be merged" in ended.reason
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await close_all(clients)

    asyncio.run(scenario())


async def until_over_or_paused(server: Federation, run_id: str) -> None:
    await server.until(lambda: server.store.run(run_id).state in ("finished", "paused"), 2 * PATIENCE)


def test_a_round_is_done_anew_and_the_third_failure_waits_for_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Picky, "failures", 3 * 6)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, rounds=3, method=PICKY)
            run = server.queue(config)
            clients = await server.clients(4, 8)
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: server.store.run(run.run_id).state == "paused")
            held = server.store.run(run.run_id)
            assert "round 2 could not be merged: nothing can be merged now; 3 attempts failed" in held.reason
            assert held.round == 1
            gone = server.store.thrown_out(run.run_id)
            assert [(one.number, one.struck) for one in gone] == [(2, False)] * 2, (
                "the same updates each time"
            )
            # The run is paused before the last of them have read it.
            await server.until(lambda: [client.cancelled for client in clients] == [[2, 2, 2]] * 2)
            monkeypatch.setattr(Picky, "failures", 0)
            await server.crash()
            await server.start()
            await server.coordinator.controls.resume(run.run_id)
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            assert [member.strikes for member in server.store.members(run.run_id)] == [0, 0]
            assert server.store.thrown_out(run.run_id) == [], "now they count"
            expected = expected_model(config, [(c.budget, c.samples) for c in clients])
            assert same_model(server.model(), expected)
            await close_all(clients)

    asyncio.run(scenario())


@pytest.mark.parametrize("profile", ["paper", "best"])
def test_a_model_that_is_far_worse_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """What one board sends in round 2 spoils the model. With `paper` the merge shows that, and whose doing it
    is; with `best` the calibration does, when the round is merged."""
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "test.npz", x_test=images, y_test=np.arange(20) % 5)

    def measured(method: QuantizedMethod, model: GlobalModel, test: Dataset) -> dict[int, Score]:
        bad = any(model.weights is weights for weights in Tainting.tainted)
        return dict.fromkeys(deployed_scores(method, model, test), Score(0.1 if bad else 0.9))

    monkeypatch.setattr(round_facts, "deployed_scores", measured)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            settings: dict[str, Any] = {"max_accuracy_drop": 0.3, "quorum": 0.5, "method": TAINTING}
            settings["test_data"] = str(tmp_path / "test.npz")
            run = server.queue(
                small_config(clients_per_round=3, rounds=2, profile=profile, keep_models=9, **settings)
            )
            clients = await server.clients(4, 4, 8)
            clients[1].train = bad_in_round_2
            assert await run_all(clients) == ["finished"] * 3
            gone = server.store.thrown_out(run.run_id)
            ended = server.store.run(run.run_id)
            assert all("the accuracy fell from 0.9000 to 0.1000" in one.reason for one in gone)
            if profile == "paper":
                assert [(one.client, one.struck) for one in gone] == [(1, True)]
                return
            assert [(one.client, one.struck) for one in gone] == [(0, False), (1, False), (2, False)]
            before, after = server.store.round(run.run_id, 1), server.store.round(run.run_id, 2)
            assert before.model == after.model == ended.model
            assert (ended.round, ended.ready, ended.bit_widths) == (2, 2, tuple(before.metrics["bit_widths"]))
            assert "the accuracy fell" in after.metrics["undone"]

    asyncio.run(scenario())


def reporting(low: Callable[[pb.Assignment], bool]) -> Measure:
    """Measures as a stand-in does, and reports a tenth of the images as right where `low` says so."""

    def measure(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Calibration:
        found = made_up(graph, assignment, payload, samples)
        return replace(found, evaluation=Evaluation(10, 1 if low(assignment) else 9))

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("all_say_so", [True, False])
def test_without_test_data_the_boards_median_decides(tmp_path: Path, all_say_so: bool) -> None:
    """After round 2 either every board finds the model spoilt, or one of three says so."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=3, rounds=2, max_accuracy_drop=0.3, keep_models=9)
            run = server.queue(config)
            clients = await server.clients(4, 4, 8)
            for number, client in enumerate(clients):
                low = all_say_so or number == 0
                client.measure = reporting(lambda assignment, low=low: low and assignment.round == 2)  # type: ignore[misc]
            assert await run_all(clients) == ["finished"] * 3
            after, gone = server.store.round(run.run_id, 2), server.store.thrown_out(run.run_id)
            if all_say_so:
                assert "the accuracy fell from 0.9000 to 0.1000" in after.metrics["undone"]
                assert [(one.client, one.struck) for one in gone] == [(0, False), (1, False), (2, False)]
                assert server.store.run(run.run_id).model == server.store.round(run.run_id, 1).model
                return
            assert gone == []
            assert after.metrics["checked_accuracy"] == 0.9
            assert after.metrics["mean_deployed_accuracy"] == pytest.approx((0.1 + 0.9 + 0.9) / 3)
            assert same_model(
                server.model(), expected_model(config, [(c.budget, c.samples) for c in clients])
            )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("bad", "together", "found"),
    [
        ({3}, set(), (3,)),
        ({1, 3}, set(), (1, 3)),
        ({0, 1, 2, 3}, set(), ()),
        (set(), {2}, (2,)),
        (set(), {1, 2}, ()),
    ],
)
def test_who_is_to_blame(bad: set[int], together: set[int], found: tuple[int, ...]) -> None:
    """`bad` fail alone; of `together` each fails only in company, and one is enough for that."""

    def works(kept: object) -> bool:
        clients = set(kept)  # type: ignore[call-overload]
        return not (clients & bad) and not (len(clients) > 1 and clients & together)

    assert find_offenders(works, [0, 1, 2, 3]) == found


def test_of_one_answer_or_of_very_many_nobody_is_blamed() -> None:
    asked = []

    def works(kept: object) -> bool:
        asked.append(kept)
        return False

    assert find_offenders(works, [5]) == ()
    assert find_offenders(works, range(1000)) == ()
    assert asked == []
