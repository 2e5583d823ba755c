"""A board that follows versions, against the real server: checks, switches, reports; and `fedmpq rollout`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fedmpq.cli.main import main
from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import federation as stub_of
from fedmpq.edge_client.follow_model import Follower, Following, checked
from fedmpq.edge_client.identity import Identity
from fedmpq.edge_client.transfer import Patience
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc
from fedmpq.server.administration_service import AdministrationService
from fedmpq.server.rollouts import Plan
from fedmpq.server.state_folder import StateFolder
from tests.server.stand_in import StandIn
from tests.server.test_rollouts import ALL, Boards, play

NO_SOAK = Plan(canary=0.5, max_errors=0.1, soak=0.0)


def follower(client: StandIn, folder: Path, check: str = "true") -> Follower:
    folder.mkdir(exist_ok=True)
    client_id, _, secret = client.identity.partition(".")
    identity = Identity(client_id, secret, client.name, client.address)
    return Follower(Following("onnx", folder, check), identity, Backoff(0.1, 0.2), Patience())


async def ask(boards: Boards, one: Follower) -> int:
    """The version in use after one question; 0: none."""
    async with grpc.aio.insecure_channel(boards.server.address) as channel:
        await one.ask(stub_of(channel))
    return 0 if one.current is None else one.current.version


def in_use(folder: Path) -> str:
    return (folder / "current.onnx").read_text()


def test_a_bad_version_is_not_switched_to_and_is_taken_back(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        await boards.make_full(number=1)
        release = await boards.release(NO_SOAK)
        client = boards.canaries(release)[0]
        folder = tmp_path / "board"
        # As a check of its own would: no model of round 2 is good on this board.
        one = follower(client, folder, "! grep -q 'round 2'")
        assert await ask(boards, one) == 0
        assert not (folder / "current.onnx").exists()
        assert boards.server.store.release(2).state == "rolled_back"
        assert await ask(boards, one) == 1
        assert in_use(folder).endswith("round 1")
        card = json.loads((folder / f"{client.name}-v1.onnx.json").read_text())
        assert card["round"] == 1

    play(tmp_path, scenario)


def test_a_good_version_is_switched_to_and_survives_a_restart_of_the_board(tmp_path: Path) -> None:
    async def scenario(boards: Boards) -> None:
        folders = [tmp_path / client.name for client in boards.clients]
        for number, version in ((1, 1), (2, 2)):
            await boards.release(ALL, number)
            made = [follower(*each) for each in zip(boards.clients, folders, strict=True)]
            # All are offered it before the first reports it.
            await boards.versions()
            assert [await ask(boards, one) for one in made] == [version] * 4
            assert boards.server.store.release(version).state == "full"
        assert {in_use(folder).rpartition(" ")[2] for folder in folders} == {"2"}
        again = follower(boards.clients[0], folders[0])
        assert again.current is not None
        assert (again.current.version, again.current.ok) == (2, 1)
        assert await ask(boards, again) == 2
        assert again.current.ok == 2
        names = sorted(path.name for path in folders[0].iterdir())
        first = boards.clients[0].name
        models = [f"{first}-v{n}.onnx{end}" for n in (1, 2) for end in ("", ".json")]
        assert names == sorted([".followed-onnx.json", "current.onnx", *models])

    play(tmp_path, scenario)


def test_a_check_says_why(tmp_path: Path) -> None:
    model = tmp_path / "a model.onnx"
    model.write_bytes(b"no model")
    assert asyncio.run(checked(model, 'test -e "a model.onnx" || test -f')) == ""
    assert asyncio.run(checked(model, "echo too dark >&2; false")) == "too dark"
    assert asyncio.run(checked(model, "exit 3;")) == "the check ended with 3"


@pytest.mark.slow
def test_without_a_command_the_runtime_computes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason='ONNX Runtime comes with `pip install "fedmpq[predict]"`')
    model = tmp_path / "model.onnx"
    model.write_bytes(b"no model")
    assert asyncio.run(checked(model, None))


def test_the_command_against_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def said(*words: str) -> str:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ["rollout", *words, "--state", str(tmp_path)])
        out, err = capsys.readouterr()
        assert bool(code) == bool(err), (code, err)
        return out or err

    async def scenario(boards: Boards) -> None:
        (tmp_path / "tls").mkdir()
        server = await _administration(boards)
        try:
            assert "no version yet" in await said("status")
            out = await said("small", "--canary", "50%", "--soak", "0", "--format", "onnx")
            assert out == "version 1 (run small, round 2): canary on 2 boards, 0 report it as good\n"
            assert "is in its canary" in await said("small", "--format", "onnx")
            await said("pin", "client-0", "1")
            facts: dict[str, Any] = json.loads(await said("status", "--json"))
            assert [board["pinned"] for board in facts["boards"]] == [1, 0, 0, 0]
            assert "is not pinned" in await said("unpin", "client-1")
            assert "rolled back; taken back by the operator" in await said("rollback", "small")
            table = await said("status")
            assert max(map(len, table.splitlines())) <= 80
            assert "client-0" in table
            assert "pinned to 1" in table
            assert "pin BOARD VERSION" in await said("pin", "client-0")
        finally:
            await server.stop(0)

    play(tmp_path, scenario)


async def _administration(boards: Boards) -> grpc.aio.Server:
    """The operator's socket of the loopback server."""

    async def no_queue(_: object) -> Any:
        raise AssertionError("no run is started here")

    server = grpc.aio.server()
    service = AdministrationService(boards.server.coordinator, no_queue)
    administration_pb2_grpc.add_AdministrationServicer_to_server(service, server)
    assert server.add_insecure_port(StateFolder(boards.server.folder).admin_target())
    await server.start()
    return server
