"""The operator's commands against a real `fedmpq server` over mutual TLS: access, status, runs."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedmpq.cli.main import main
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from tests.waiting import until
from tools.programs import FEDMPQ, Program, free_port

Capture = pytest.CaptureFixture[str]
RUN = """
name = "{name}"
model = "digits_cnn"
rounds = 3
clients_per_round = 2
min_clients = 2
image = [8, 8, 1]
classes = 10
input_scale = 0.01
input_zero_point = 78
"""
SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    state: Path
    port: int
    program: Program

    def stub(self, bundle: str) -> Any:
        """Calls as the board whose bundle it is, over a connection of its own."""
        folder = self.state / "bundles" / bundle
        keys = [(folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.secure_channel(f"localhost:{self.port}", grpc.ssl_channel_credentials(*keys), options)
        make_stub: Any = federation_pb2_grpc.FederationStub
        return make_stub(channel)

    def token(self, bundle: str) -> str:
        return (self.state / "bundles" / bundle / "token").read_text().strip()

    def enrol(self, bundle: str, name: str | None = None) -> tuple[tuple[str, str], ...]:
        """The metadata that proves the new identity."""
        request = pb.EnrollRequest(token=self.token(bundle), name=name or bundle, budget=4, version="1")
        given = self.stub(bundle).Enroll(request, timeout=SECONDS)
        return (("authorization", f"Bearer {given.client_id}.{given.secret}"),)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all: it starts by tracing a model, which takes seconds."""
    folder = tmp_path_factory.mktemp("operator")
    state = folder / "state"
    (folder / "run.toml").write_text(RUN.format(name="first"))
    assert main(["server", "init", "--state", str(state)]) == 0
    port = free_port()
    words = ["server", str(folder / "run.toml"), "--state", str(state), "--listen", f"127.0.0.1:{port}"]
    program = Program([*FEDMPQ, *words], folder / "log")
    try:
        program.wait_for("listening")
        yield Served(state, port, program)
    finally:
        program.kill()


@pytest.fixture
def ask(served: Served, capsys: Capture) -> Callable[..., dict[str, Any]]:
    """The JSON a command prints."""

    def command(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--state", str(served.state), "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return command


Ask = Callable[..., dict[str, Any]]


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), str(caught.value.details())


def probe(served: Served, bundle: str, metadata: tuple[tuple[str, str], ...]) -> tuple[grpc.StatusCode, str]:
    """How the server answers a call of that board; a board it knows is told that there is no such payload."""
    request = pb.DownloadRequest(payload=b"x" * 32)
    stub = served.stub(bundle)
    return refused(lambda: list(stub.Download(request, metadata=metadata, timeout=SECONDS)))


@pytest.mark.slow
def test_the_socket_is_the_owners_alone(served: Served) -> None:
    assert stat.S_IMODE((served.state / "admin.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(served.state.stat().st_mode) == 0o700


def test_status_of_a_server_that_waits(ask: Ask) -> None:
    end = time.monotonic() + SECONDS
    while "0 of 2 clients" not in (facts := ask("status"))["run"]["reason"]:
        assert time.monotonic() < end, facts
        time.sleep(0.05)
    assert facts["running"] is True
    assert (facts["run"]["name"], facts["run"]["state"]) == ("first", "waiting")
    assert facts["run"]["metrics"] is None


@pytest.mark.slow
def test_runs_are_queued_paused_resumed_and_aborted(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "second.toml"
    file.write_text(RUN.format(name="second"))
    assert ask("runs", "start", str(file))["state"] == "waiting"
    assert [run["name"] for run in ask("runs")["runs"]] == ["second", "first"]
    assert ask("runs", "pause", "first")["state"] == "paused"
    assert ask("runs", "resume", "first")["state"] == "waiting"
    assert ask("runs", "abort", "second")["state"] == "aborted"


def test_a_mistake_in_a_runs_file_is_told_by_the_server(
    served: Served, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "third.toml"
    file.write_text("roundz = 3\n" + RUN.format(name="third"))
    assert main(["runs", "start", str(file), "--state", str(served.state)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedmpq runs: ")
    assert "roundz" in error
    assert error.count("\n") == 1


def test_what_the_server_refuses_is_one_line(served: Served, ask: Ask, capsys: Capture) -> None:
    assert main(["runs", "resume", "first", "--state", str(served.state)]) == 2
    assert capsys.readouterr().err == "fedmpq runs: run 'first' is waiting; it must be paused for that\n"


def test_a_bundle_enrols_its_board_once(served: Served, ask: Ask) -> None:
    ask("server", "bundle", "camera-1")
    code, message = refused(lambda: served.enrol("camera-1", "camera-9"))
    assert (code, "for the client 'camera-1'" in message) == (grpc.StatusCode.UNAUTHENTICATED, True)
    metadata = served.enrol("camera-1")
    assert probe(served, "camera-1", metadata)[0] is grpc.StatusCode.NOT_FOUND
    assert refused(lambda: served.enrol("camera-1"))[0] in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.ALREADY_EXISTS,
    )
    assert "camera-1" in [client["name"] for client in ask("status")["clients"]]


def test_an_identity_is_of_no_use_with_anothers_certificate(served: Served, ask: Ask) -> None:
    ask("server", "bundle", "camera-2", "camera-3")
    metadata = served.enrol("camera-2")
    assert probe(served, "camera-2", metadata)[0] is grpc.StatusCode.NOT_FOUND
    code, message = probe(served, "camera-3", metadata)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "camera-2" in message


def test_a_revoked_board_is_refused_at_its_next_call(served: Served, ask: Ask) -> None:
    ask("server", "bundle", "camera-4")
    metadata = served.enrol("camera-4")
    stub = served.stub("camera-4")
    request = pb.DownloadRequest(payload=b"x" * 32)

    def call() -> Any:
        return list(stub.Download(request, metadata=metadata, timeout=SECONDS))

    assert refused(call)[0] is grpc.StatusCode.NOT_FOUND
    ask("server", "revoke", "camera-4")
    code, message = refused(call)
    assert (code, "revoked" in message) == (grpc.StatusCode.UNAUTHENTICATED, True)
    assert not (served.state / "bundles" / "camera-4").exists()


def test_when_a_board_was_last_here_and_what_it_showed(served: Served, ask: Ask) -> None:
    ask("server", "bundle", "camera-6", "--days", "20")
    metadata = served.enrol("camera-6")

    def seen() -> dict[str, Any]:
        return next(one for one in ask("status")["clients"] if one["name"] == "camera-6")

    assert [seen()[name] for name in ("last_seen", "certificate_ends", "free_bytes")] == [None, None, None]
    hello = pb.ListenRequest(
        budget=4, samples=10, version="1", engine="none", answers=True, free_bytes=7_000_000
    )
    stream = served.stub("camera-6").Listen(hello, metadata=metadata)
    assert next(stream).WhichOneof("event") == "welcome"
    here = until(lambda: facts if (facts := seen())["connected"] else None)
    assert here is not None
    ends = datetime.fromisoformat(here["certificate_ends"].replace("Z", "+00:00"))
    assert 19 <= (ends - datetime.now(timezone.utc)).total_seconds() / 86400 <= 20
    assert here["free_bytes"] == 7_000_000
    stream.cancel()
    gone = until(lambda: None if (facts := seen())["connected"] else facts)
    assert gone is not None
    assert gone["last_seen"] <= until(lambda: ask("status")["time"])
    assert (gone["certificate_ends"], gone["free_bytes"]) == (here["certificate_ends"], 7_000_000)
    assert "client disconnected client=camera-6 reason=gone" in served.program.log.read_text()
    ask("server", "revoke", "camera-6")


def test_no_one_is_let_in_without_an_identity(served: Served, ask: Ask) -> None:
    ask("server", "bundle", "camera-5")
    for metadata in (
        (),
        (("authorization", f"Bearer {'0' * 32}.{'x' * 43}"),),
        (("authorization", "Bearer x"),),
    ):
        assert probe(served, "camera-5", metadata)[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_it_stops_and_its_folder_remembers(served: Served, ask: Ask, capsys: Capture) -> None:
    ask("server", "bundle", "camera-7")
    hello = pb.ListenRequest(budget=4, samples=10, version="1", engine="none")
    stream = served.stub("camera-7").Listen(hello, metadata=served.enrol("camera-7"))
    assert next(stream).WhichOneof("event") == "welcome"
    assert served.program.terminate() == 0
    assert not (served.state / "admin.sock").exists()
    assert main(["status", "--state", str(served.state), "--json"]) == 2
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["running"], facts["run"]["name"]) == (False, "first")
    assert "no server runs in" in err
    seen = {client["name"]: client["last_seen"] for client in facts["clients"]}
    assert seen["camera-7"] is not None
    served.program.restart()
    end = time.monotonic() + SECONDS
    while main(["status", "--state", str(served.state)]) != 0:
        assert time.monotonic() < end
        time.sleep(0.1)
