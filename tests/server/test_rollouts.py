"""Rollouts over real gRPC: which version a board gets, what its reports do, and what is never offered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from fedmpq.exchange.wire import digest
from fedmpq.proto import administration_pb2 as admin
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.exports import ExportFailed
from fedmpq.server.model_calls import MAX_COUNT, REPORTS
from fedmpq.server.rollout_status import rollouts_status
from fedmpq.server.rollouts import Plan, RolloutError
from fedmpq.server.store.records import Release, Run
from tests.server.loopback import Federation, close_all, federation, run_all, small_config
from tests.server.stand_in import StandIn
from tests.server.test_federation_service import refused

WEEK = 7 * 86400.0
HALF = Plan(canary=0.5, max_errors=0.1, soak=60.0)
ALL = Plan(canary=1.0, max_errors=0.1, soak=0.0)


def export(folder: Path, run: Run, number: int, boards: int) -> None:
    """What the exporter leaves when it has verified the models of round `number`."""
    made = folder / "exports" / f"{run.run_id}-{number}-onnx"
    made.mkdir(parents=True, exist_ok=True)
    for client in range(boards):
        data = f"model of client {client}, round {number}".encode()
        (made / f"client-{client}.onnx").write_bytes(data)
        card = {"suffix": ".onnx", "sha256": digest(data).hex(), "clients": [client], "round": number}
        (made / f"client-{client}.onnx.json").write_text(json.dumps(card))


class Boards:
    """Boards of a run that has ended, with model files of its last round."""

    def __init__(self, server: Federation, run: Run, clients: list[StandIn]) -> None:
        self.server, self.run, self.clients = server, run, clients

    @classmethod
    async def of(cls, server: Federation, count: int = 4) -> Boards:
        settings = {"clients_per_round": count, "min_clients": count, "rounds": 2, "statistics": "averaged"}
        run = server.queue(small_config(**settings))
        clients = await server.clients(*[4.0] * count)
        await run_all(clients)
        await server.until(lambda: server.store.run(run.run_id).state == "finished")
        export(server.folder, run, 2, count)
        return cls(server, server.store.run(run.run_id), clients)

    async def release(self, plan: Plan = HALF, number: int = 0) -> Release:
        export(self.server.folder, self.run, number or self.run.ready, len(self.clients))
        return await self.server.coordinator.rollouts.start(self.run.run_id, number, plan, ["onnx"])

    def canaries(self, release: Release) -> list[StandIn]:
        return [each for each in self.clients if each.identity.split(".")[0] in release.canary]

    async def ask(self, client: StandIn) -> pb.ModelOffer:
        request = pb.GetModelRequest(format="onnx")
        offer: pb.ModelOffer = await client.stub.GetModel(request, metadata=client.metadata)
        return offer

    async def versions(self) -> list[int]:
        return [(await self.ask(client)).version for client in self.clients]

    async def report(self, client: StandIn, version: int, ok: int, errors: int = 0) -> None:
        request = pb.ReportModelRequest(
            version=version, format="onnx", ok=ok, errors=errors, running=not errors
        )
        request.reason = "no session\n" if errors else ""
        await client.stub.ReportModel(request, metadata=client.metadata)

    async def make_full(self, number: int = 0) -> None:
        release = await self.release(ALL, number)
        await self.versions()
        for client in self.clients:
            await self.report(client, release.version, 1)
        assert self.server.store.release(release.version).state == "full"


Scenario = Callable[[Boards], Awaitable[None]]


def play(folder: Path, scenario: Scenario) -> None:
    async def played() -> None:
        async with federation(folder) as server:
            boards = await Boards.of(server)
            try:
                await scenario(boards)
            finally:
                await close_all(boards.clients)

    asyncio.run(played())


def test_a_canary_with_errors_is_taken_back_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(boards: Boards) -> None:
        assert await boards.versions() == [0] * 4, "without versions boards get the newest model"
        await boards.make_full(number=1)
        release = await boards.release()
        first = boards.canaries(release)
        assert len(first) == 2
        assert sorted(await boards.versions()) == [1, 1, 2, 2]
        with caplog.at_level(logging.WARNING, "fedmpq.server"):
            await boards.report(first[0], 2, 0, 1)
        assert "version rolled back" in caplog.text
        assert await boards.versions() == [1] * 4
        offer = await boards.ask(first[0])
        assert json.loads(offer.card)["round"] == 1
        kept = boards.server.store.release(2)
        assert (kept.state, kept.reason) == ("rolled_back", "errors 100.0%, above 10.0%: no session")

    play(tmp_path, scenario)


def test_a_good_one_reaches_every_board_also_one_that_was_away_for_a_week(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        await boards.make_full(number=1)
        release = await boards.release()
        first = boards.canaries(release)
        away = next(client for client in boards.clients if client not in first)
        for client in first:
            assert (await boards.ask(client)).version == 2
            await boards.report(client, 2, 1)
        boards.server.clock_error = 59.0
        for client in first:
            await boards.report(client, 2, 2)
        assert (await boards.ask(away)).version == 1, "it has not soaked yet"
        # A crash between the reports loses nothing of them.
        await boards.server.crash()
        await boards.server.start()
        boards.server.clock_error = 61.0
        for client in first:
            await client.close()
            await boards.report(client, 2, 3)
        assert boards.server.store.release(2).state == "full"
        boards.server.clock_error = WEEK
        await boards.server.crash()
        await boards.server.start()
        await away.close()
        offer = await boards.ask(away)
        assert (offer.version, offer.ask_again_seconds) == (2, 3600)
        download = away.stub.Download(pb.DownloadRequest(payload=offer.payload), metadata=away.metadata)
        whole = b""
        while isinstance(chunk := await download.read(), pb.Chunk):
            whole += chunk.data
        assert digest(whole) == offer.payload

    play(tmp_path, scenario)


@pytest.mark.slow
def test_nothing_unverified_is_offered(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        boards.server.store.configure_run(
            boards.run.run_id, boards.run.config, {**boards.run.config, "export": ["no.such:Target"]}
        )
        with pytest.raises(ExportFailed, match=r"no\.such"):
            await boards.server.coordinator.rollouts.start(
                boards.run.run_id, 0, ALL, ["onnx", "no.such:Target"]
            )
        assert boards.server.store.list_releases() == [], "an export that fails makes no version"
        await boards.make_full()
        folder = tmp_path / "exports" / f"{boards.run.run_id}-2-onnx"
        good = (folder / "client-0.onnx").read_bytes()
        (folder / "client-0.onnx").write_bytes(good[:-1] + b"?")
        error = await refused(boards.ask(boards.clients[0]))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        card = json.loads((folder / "client-0.onnx.json").read_text())
        card["sha256"] = digest(good[:-1] + b"?").hex()
        (folder / "client-0.onnx.json").write_text(json.dumps(card))
        error = await refused(boards.ask(boards.clients[0]))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await boards.ask(boards.clients[1])).version == 1

    play(tmp_path, scenario)


def test_reports_are_checked_and_bounded(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        await boards.make_full(number=1)
        release = await boards.release()
        other = next(client for client in boards.clients if client not in boards.canaries(release))
        await boards.ask(other)
        for version, ok, code in (
            (2, 1, grpc.StatusCode.FAILED_PRECONDITION),
            (0, 1, grpc.StatusCode.INVALID_ARGUMENT),
            (1, MAX_COUNT + 1, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            assert (await refused(boards.report(other, version, ok))).code() is code
        stranger = StandIn(boards.server.address, "stranger", identity=f"{'0' * 32}.{'A' * 43}")
        error = await refused(boards.report(stranger, 1, 1))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        await stranger.close()
        error = await refused(_many(boards, other))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(tmp_path, scenario)


async def _many(boards: Boards, client: StandIn) -> None:
    for number in range(2 * REPORTS.burst):
        await boards.report(client, 1, number)


def test_the_operator_pins_goes_back_and_sees_who_runs_what(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        store = boards.server.store
        await boards.make_full(number=1)
        await boards.server.coordinator.rollouts.pin("client-0", 1)
        await boards.release(ALL)
        assert await boards.versions() == [1, 2, 2, 2]
        status = await asyncio.to_thread(rollouts_status, store)
        assert [(each.name, each.version, each.wanted, each.pinned) for each in status.boards] == [
            ("client-0", 1, 1, 1),
            ("client-1", 1, 2, 0),
            ("client-2", 1, 2, 0),
            ("client-3", 1, 2, 0),
        ]
        shown = admin.ReleaseStatus(version=2, run="small", round=2, state="canary", canary=3)
        assert [getattr(status.releases[0], name.name) for name, _ in shown.ListFields()] == [
            value for _, value in shown.ListFields()
        ]
        assert (await boards.server.coordinator.rollouts.roll_back(boards.run.run_id)).state == "rolled_back"
        await boards.server.coordinator.rollouts.pin("client-0", 0)
        assert await boards.versions() == [1] * 4
        for name, version, words in (
            ("nobody", 1, "no board is called"),
            ("client-0", 0, "is not pinned"),
            ("client-0", 7, "no version 7"),
        ):
            with pytest.raises(ValueError, match=words):
                await boards.server.coordinator.rollouts.pin(name, version)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "plan", [Plan(0.0, 0.1, 0), Plan(1.1, 0.1, 0), Plan(0.5, 1.0, 0), Plan(0.5, 0.1, -1), Plan(0.5, -0.1, 0)]
)
def test_a_plan_that_cannot_be(plan: Plan) -> None:
    with pytest.raises(RolloutError):
        plan.check()
