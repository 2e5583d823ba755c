"""The state machine over real sockets: whom it selects, when it closes a round, what it makes of crashes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from fedmpq.exchange.messages import Calibration, Update
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.model.calibration import statistics_names
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server import calibration_work
from fedmpq.server.claim_limits import ClaimLimits
from tests.server.loopback import (
    PATIENCE,
    close_all,
    expected_model,
    federation,
    run_all,
    same_model,
    small_config,
)
from tests.server.small_model import GRAPH
from tests.server.stand_in import StandIn, made_up, nudge


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["paper", "best"])
def test_a_run_ends_with_the_model_that_the_method_alone_makes(tmp_path: Path, profile: str) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=4, rounds=3, profile=profile)
            server.queue(config)
            clients = await server.clients(2, 4, 6, 8)
            assert await run_all(reversed_copy(clients)) == ["finished"] * 4
            expected = expected_model(config, [(c.budget, c.samples) for c in clients])
            assert same_model(server.model(), expected)

    asyncio.run(scenario())


def reversed_copy(clients: list[StandIn]) -> list[StandIn]:
    """Who connects first must not matter."""
    return clients[::-1]


@pytest.mark.slow
def test_some_of_the_clients_are_drawn_for_each_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, min_clients=5, rounds=6)
            server.queue(config)
            clients = await server.clients(2, 3, 4, 5, 6)
            await run_all(clients)
            expected = expected_model(config, [(c.budget, c.samples) for c in clients])
            assert same_model(server.model(), expected)
            assert sum(len(client.receipts) for client in clients) == 12
            assert sum(bool(client.receipts) for client in clients) > 2

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_crashes_at_any_moment_change_nothing(tmp_path: Path, seed: int) -> None:
    """The same clients, the same rounds, the same model to the bit."""
    moments = random.Random(seed)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=3, rounds=5)
            server.queue(config)
            clients = await server.clients(2, 4, 8)
            running = [asyncio.create_task(client.run()) for client in clients]
            for _ in range(6):
                await asyncio.sleep(moments.random() * 0.15)
                await server.crash()
                await server.start()
            states = await asyncio.wait_for(asyncio.gather(*running), PATIENCE)
            assert states == ["finished"] * 3
            expected = expected_model(config, [(c.budget, c.samples) for c in clients])
            assert same_model(server.model(), expected)
            assert len(list((tmp_path / "blobs").iterdir())) == 3, (
                "a graph, the last model and whose they are"
            )
            await close_all(clients)

    asyncio.run(scenario())


def test_an_acknowledged_update_survives_and_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, rounds=1)
            run = server.queue(config)
            first, second = await server.clients(4, 8)
            assignments = await both_assigned(first, second)
            payload = await first.download(assignments[0].payload)
            update = first.update(assignments[0], payload)
            receipt = await first.upload(run.run_id, 1, update)
            await server.crash()
            await server.start()
            await close_all([first, second])
            assert await first.upload(run.run_id, 1, update) == receipt
            status = await first.stub.GetUpload(
                pb.GetUploadRequest(run_id=run.run_id, round=1, payload=receipt.payload),
                metadata=first.metadata,
            )
            assert status.receipt == receipt
            await run_all([first, second])
            expected = expected_model(config, [(c.budget, c.samples) for c in (first, second)])
            assert same_model(server.model(), expected)
            assert await first.upload(run.run_id, 1, update) == receipt, "after the round, too"
            await first.close()

    asyncio.run(scenario())


async def both_assigned(*clients: StandIn) -> list[pb.Assignment]:
    """The assignments of clients that connect and then hang up."""
    streams = [client.listen() for client in clients]
    assignments = []
    for client, stream in zip(clients, streams, strict=True):
        async for event in stream:
            if event.WhichOneof("event") == "run":
                client._graph = Graph.from_bytes(await client.download(event.run.graph_id))
            if event.WhichOneof("event") == "assignment":
                assignments.append(event.assignment)
                break
    for stream in streams:
        stream.cancel()
    return assignments


def test_over_selection_closes_with_the_fastest_and_tells_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(
                small_config(
                    clients_per_round=2, over_selection=0.5, min_clients=3, rounds=2, calibration_seconds=1
                )
            )
            clients = await server.clients(4, 4, 4)
            hold = asyncio.Event()
            slow = clients[1]
            original = slow.work

            async def wait_first(assignment: pb.Assignment) -> None:
                await hold.wait()
                await original(assignment)

            slow.work = wait_first  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in clients]
            run = server.store.run_by_name("small")
            assert run is not None
            await server.until(lambda: server.store.run(run.run_id).state == "finished")
            hold.set()
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 3
            assert slow.cancelled == [1, 2, 2], "twice as one that trains, and in the run's calibration"
            assert slow.receipts == {}, "what comes too late is refused"
            assert slow.measured == {}
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "cut", "updated"]
            assert server.store.members(run.run_id)[1].strikes == 0
            await close_all(clients)

    asyncio.run(scenario())


def test_a_deadline_closes_with_a_quorum(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, quorum=0.5, deadline_seconds=0.5, rounds=1)
            run = server.queue(replace(config, calibration_seconds=1.0))
            quick, silent = await server.clients(4, 4)
            silent.work = never  # type: ignore[method-assign]
            assert await run_all([quick, silent]) == ["finished"] * 2
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "cut"]
            assert silent.cancelled == [1, 1]
            measured = server.store.calibration(run.run_id, 1)
            assert measured is not None
            assert [seat.state for seat in measured.seats] == ["updated", "cut"]

    asyncio.run(scenario())


async def never(assignment: pb.Assignment) -> None:
    """A client that takes its work and is not heard of again."""


def test_without_a_quorum_the_round_goes_on_with_those_who_are_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, deadline_seconds=2, rounds=1, calibration_seconds=1)
            run = server.queue(config)
            first, lost, spare = await server.clients(4, 4, 4)
            lost.work = never  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in (first, lost)]
            await server.until(lambda: server.coordinator.round is not None)
            running[1].cancel()
            await asyncio.gather(running[1], return_exceptions=True)
            await lost.close()
            await server.until(lambda: server.coordinator.tally.extended >= 1)
            assert server.store.run(run.run_id).round == 0, "one update is no quorum of two"
            assert await run_all([spare]) == ["finished"]
            assert await asyncio.wait_for(running[0], PATIENCE) == "finished"
            stored = server.store.round(run.run_id, 1)
            assert {seat.client: seat.state for seat in stored.seats} == {
                0: "updated",
                1: "cut",
                2: "updated",
            }
            assert stored.extended >= 1
            await close_all([first, lost, spare])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_rejected_update_costs_its_sender_and_not_the_round(tmp_path: Path) -> None:
    def too_loud(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
        return replace(nudge(graph, assignment, payload, samples), samples=samples * 1000)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2, min_clients=3, rounds=6))
            clients = await server.clients(4, 4, 4)
            bad = clients[1]
            bad.train = too_loud
            original = bad.work
            refusals: list[grpc.aio.AioRpcError] = []

            async def keep_trying(assignment: pb.Assignment) -> None:
                try:
                    await original(assignment)
                except grpc.aio.AioRpcError as error:
                    refusals.append(error)

            bad.work = keep_trying  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: server.store.members(run.run_id)[1:2] and len(refusals) == 3)
            # Shut out for good; the run waits for a third good client.
            spare = StandIn(server.address, "z", 5.0, recorder=server.recorder("z"))
            await spare.enrol(server.token())
            running.append(asyncio.create_task(spare.run()))
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 4
            assert all(error.code() is grpc.StatusCode.INVALID_ARGUMENT for error in refusals)
            assert all("samples" in (error.details() or "") for error in refusals)
            assert server.store.members(run.run_id)[1].strikes == 3
            for number in range(1, 7):
                stored = server.store.round(run.run_id, number)
                assert stored.metrics["updates"] == 2
            await close_all([*clients, spare])

    asyncio.run(scenario())


@pytest.mark.slow
def test_pause_resume_and_abort(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1000))
            (client,) = await server.clients(4)
            running = asyncio.create_task(client.run())
            await server.until(lambda: server.store.run(run.run_id).round >= 2)
            await server.coordinator.controls.pause(run.run_id)
            await server.until(lambda: server.coordinator.waiting_for == "the operator")
            paused_at = server.store.run(run.run_id).round
            await asyncio.sleep(0.2)
            assert server.store.run(run.run_id).round == paused_at
            await server.coordinator.controls.resume(run.run_id)
            await server.until(lambda: server.store.run(run.run_id).round > paused_at)
            await server.coordinator.controls.abort(run.run_id)
            assert await asyncio.wait_for(running, PATIENCE) == "aborted"
            assert server.store.run(run.run_id).state == "aborted"
            await client.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_runs_follow_one_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            for name in ("one", "two"):
                server.queue(small_config(name=name, clients_per_round=2))
            clients = await server.clients(4, 4)
            assert await run_all(clients) == ["finished"] * 2
            assert await run_all(clients) == ["finished"] * 2
            assert same_model(server.model("one"), server.model("two"))
            assert [run.state for run in server.store.list_runs()] == ["finished"] * 2

    asyncio.run(scenario())


def test_who_comes_later_joins_with_the_next_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(
                small_config(participation=1.0, clients_per_round=None, min_clients=1, rounds=400)
            )
            first, second = await server.clients(4, 8)
            running = [asyncio.create_task(first.run())]
            await server.until(lambda: server.store.run(run.run_id).round >= 1)
            running.append(asyncio.create_task(second.run()))
            await server.until(lambda: len(second.receipts) >= 2)
            await server.coordinator.controls.abort(run.run_id)
            assert await asyncio.gather(*running) == ["aborted"] * 2
            members = server.store.members(run.run_id)
            assert [(member.client, member.record.budget) for member in members] == [(0, 4.0), (1, 8.0)]
            await close_all([first, second])

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", [False, True])
def test_accuracy_is_measured_on_test_data_and_is_no_reason_to_stop(tmp_path: Path, lost: bool) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "test.npz", x_test=images, y_test=np.arange(20) % 5)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=2, test_data=str(tmp_path / "test.npz")))
            if lost:
                (tmp_path / "test.npz").unlink()
            assert await run_all(await server.clients(4, 8)) == ["finished"] * 2
            stored = server.store.round(run.run_id, 2)
            assert stored.metrics["measured_by"] == ("" if lost else "server")
            assert set(stored.metrics["deployed_accuracy"]) == (set() if lost else {"4", "8"})

    asyncio.run(scenario())


def test_without_test_data_clients_measure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1))
            assert await run_all(await server.clients(4, 8)) == ["finished"] * 2
            stored = server.store.round(run.run_id, 1)
            assert stored.metrics["measured_by"] == "clients"
            assert stored.metrics["deployed_accuracy"] == {"4": 0.5, "8": pytest.approx(5 / 11)}

    asyncio.run(scenario())


def test_a_revoked_client_is_selected_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=100_000))
            (client,) = await server.clients(4)
            running = asyncio.create_task(client.run())
            await server.until(lambda: server.store.run(run.run_id).round >= 1)
            server.store.revoke_client("client-0", 0.0)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.wait_for(running, PATIENCE)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await client.close()

    asyncio.run(scenario())


def test_what_a_client_claims_counts_within_the_operators_limits(tmp_path: Path) -> None:
    """Its updates are good whatever they say; the merge is that of a client with what it may claim."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(rounds=2)
            run = server.queue(config)
            plain, boaster = await server.clients(4, 8)
            boaster.samples = 9_000_000
            server.store.limit_client("client-1", ClaimLimits(max_samples=11, max_budget=5.0))
            assert await run_all([plain, boaster]) == ["finished"] * 2
            assert same_model(server.model(), expected_model(config, [(4, 10), (5.0, 11)]))
            metrics = server.store.round(run.run_id, 2).metrics
            assert (metrics["updates"], metrics["rejected"]) == (2, 0)
            (said,) = [one for one in server.store.list_clients() if one.name == "client-1"]
            assert (said.samples, said.budget) == (9_000_000, 8)

    asyncio.run(scenario())


# Calibration


def test_those_who_trained_measure_and_at_the_end_everybody_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(
                small_config(clients_per_round=2, min_clients=4, rounds=5, evaluate_every=2, keep_models=5)
            )
            clients = await server.clients(2, 4, 6, 8)
            assert await run_all(clients) == ["finished"] * 4
            for number in range(1, 6):
                trained = server.store.round(run.run_id, number)
                measured = server.store.calibration(run.run_id, number)
                assert (measured is not None) == (number in (2, 4, 5))
                if measured is None:
                    continue
                who = {seat.client for seat in measured.seats}
                assert who == ({0, 1, 2, 3} if number == 5 else {seat.client for seat in trained.seats})
                assert trained.metrics["calibrated_by"] == len(who)
                assert trained.metrics["calibrated_on"] == "clients"
            assert server.store.run(run.run_id).ready == 5
            assert sum(len(client.measured) for client in clients) == 2 + 2 + 4

    asyncio.run(scenario())


def test_statistics_that_cannot_be_cost_their_sender_and_not_the_calibration(tmp_path: Path) -> None:
    def absurd(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Calibration:
        honest = made_up(graph, assignment, payload, samples)
        wild = {name: tensor * np.float32(1e4) for name, tensor in honest.statistics.items()}
        return replace(honest, statistics=wild)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=3, rounds=1)
            run = server.queue(config)
            clients = await server.clients(4, 4, 8)
            bad = clients[1]
            bad.measure = absurd
            refused = only_told(bad)
            assert await run_all(clients) == ["finished"] * 3
            assert [error.code() for error in refused] == [grpc.StatusCode.INVALID_ARGUMENT]
            assert "is possible with the model that was sent" in (refused[0].details() or "")
            assert [member.strikes for member in server.store.members(run.run_id)] == [0, 1, 0]
            stored = server.store.round(run.run_id, 1)
            assert (stored.metrics["calibrated_by"], stored.metrics["rejected"]) == (2, 1)
            others = expected_model(config, [(c.budget, c.samples) for c in clients], measuring={0, 2})
            assert same_model(server.model(), others)

    asyncio.run(scenario())


def only_told(client: StandIn) -> list[grpc.aio.AioRpcError]:
    """The refusals of a client that goes on all the same."""
    refused: list[grpc.aio.AioRpcError] = []
    original = client.work

    async def go_on(assignment: pb.Assignment) -> None:
        try:
            await original(assignment)
        except grpc.aio.AioRpcError as error:
            refused.append(error)

    client.work = go_on  # type: ignore[method-assign]
    return refused


@pytest.mark.slow
def test_a_board_that_is_gone_does_not_hold_up_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_work, "AWAY_SECONDS", 0.5)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2, rounds=1, calibration_seconds=10_000))
            stays, goes = await server.clients(4, 8)
            original = goes.work

            async def leave_after_training(assignment: pb.Assignment) -> None:
                if assignment.phase == pb.CALIBRATION:
                    raise asyncio.CancelledError
                await original(assignment)

            goes.work = leave_after_training  # type: ignore[method-assign]
            leaving = asyncio.create_task(goes.run())
            staying = asyncio.create_task(stays.run())
            await asyncio.gather(leaving, return_exceptions=True)
            await goes.close()
            assert await asyncio.wait_for(staying, PATIENCE) == "finished"
            measured = server.store.calibration(run.run_id, 1)
            assert measured is not None
            assert [seat.state for seat in measured.seats] == ["updated", "cut"]
            await stays.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_calibration_that_nobody_answers_asks_others(tmp_path: Path) -> None:
    """A run does not end with statistics that nobody measured."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1, calibration_seconds=1))
            silent, late = await server.clients(4, 8)
            original = silent.work

            async def train_only(assignment: pb.Assignment) -> None:
                if assignment.phase == pb.TRAINING:
                    await original(assignment)

            silent.work = train_only  # type: ignore[method-assign]
            running = asyncio.create_task(silent.run())
            await server.until(lambda: server.coordinator.tally.extended >= 1)
            assert server.store.run(run.run_id).state == "running"
            assert await run_all([late]) == ["finished"]
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            measured = server.store.calibration(run.run_id, 1)
            assert measured is not None
            assert {seat.client: seat.state for seat in measured.seats} == {0: "cut", 1: "updated"}
            await close_all([silent])

    asyncio.run(scenario())


def test_the_server_measures_on_its_own_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    labels = np.arange(40) % 5
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=2, calibration_data=str(tmp_path / "own.npz")))
            clients = await server.clients(4, 8)
            assert await run_all(clients) == ["finished"] * 2
            assert all(client.measured == {} for client in clients)
            stored = server.store.round(run.run_id, 2)
            assert stored.metrics["calibrated_on"] == "server"
            assert server.store.run(run.run_id).ready == 2
            model = server.model()
            method = QuantizedMethod(GRAPH, small_config().recipe(), 0)
            again = method.calibrated_on(model, images[..., None])
            for name in statistics_names(GRAPH):
                np.testing.assert_array_equal(again.final.side[name], model.final.side[name])
            assert (model.final.side["bn1.running_var"] != model.side["bn1.running_var"]).any()

    asyncio.run(scenario())


def test_a_calibration_waits_while_the_run_is_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(4)
            original = client.work

            async def pause_then_train(assignment: pb.Assignment) -> None:
                if assignment.phase == pb.TRAINING:
                    await server.coordinator.controls.pause(run.run_id)
                await original(assignment)

            client.work = pause_then_train  # type: ignore[method-assign]
            running = asyncio.create_task(client.run())
            await server.until(lambda: server.coordinator.waiting_for == "the operator")
            assert server.store.calibration(run.run_id, 1) is None
            await server.coordinator.controls.resume(run.run_id)
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            await client.close()

    asyncio.run(scenario())
