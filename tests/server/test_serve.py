"""`fedmpq server` as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]
    ProtoReflectionDescriptorDatabase,
)

from fedmpq.server.boards_port import OPTIONS
from fedmpq.server.serve import _until
from fedmpq.system.addresses import split_address
from tools.programs import FEDMPQ, Program, wait_until

SECONDS = 60.0
RUN = """
model = "digits_cnn"
rounds = 2
clients_per_round = 2
image = [8, 8, 1]
classes = 10
input_scale = 0.01
input_zero_point = 78
"""


class Server:
    """A context manager: however the test ends, the process does too."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.state = folder / "state"
        words = ("server", *words, "--state", str(self.state), "--listen", "127.0.0.1:0")
        self.program = Program([*FEDMPQ, *words], folder / "server.log")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.kill()

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        file = self.state / "listening"
        wait_until(file.exists, "its address", [self.program], SECONDS)
        return file.read_text().strip()


def run_to_end(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a server that ends by itself."""
    command = [*FEDMPQ, "server", *words, "--state", str(folder / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_it_says_where_it_listens_and_stops_on_sigterm(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        address = server.address
        assert split_address(address)[1] > 0
        server.program.wait_for(f"fedmpq server listening on {address} (without TLS)")
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert "fedmpq.v1.Federation" in services
            assert "fedmpq.v1.Administration" not in services
        assert (server.state.stat().st_mode & 0o777) == 0o700
        assert ((server.state / "admin.sock").stat().st_mode & 0o777) == 0o600
        assert server.program.terminate() == 0
        assert not (server.state / "listening").exists()
        assert not (server.state / "admin.sock").exists()


@pytest.mark.slow
def test_it_starts_again_after_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        assert server.address
        server.program.kill()
        (server.state / "listening").unlink()
        server.program.restart()
        assert server.address
        assert server.program.terminate() == 0


def test_what_a_server_waits_for_ends_with_the_order_to_stop() -> None:
    async def scenario() -> None:
        stopped, telling = asyncio.Event(), asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(_until(stopped, telling))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        stopped.set()
        await waiting
        telling.set_exception(OSError("the disk is gone"))
        with pytest.raises(OSError, match="the disk is gone"):
            await _until(asyncio.Event(), telling)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_restart_is_quick_and_without_torch(tmp_path: Path) -> None:
    """What a restart imports; the time itself depends on what else the machine does."""
    script = (
        "import sys, fedmpq.server.serve, fedmpq.cli.server_command\n"
        "slow = {'torch', 'alembic', 'fsspec', 'cryptography', 'prometheus_client'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_without_tls_only_loopback_is_served(tmp_path: Path, listen: str) -> None:
    code, output = run_to_end(tmp_path, "--listen", listen)
    assert code == 2
    assert "--insecure" in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "state").exists()


def test_insecure_can_be_asked_for_by_name(tmp_path: Path) -> None:
    command = ("--listen", "0.0.0.0:0", "--insecure", "--exit-when-done")
    code, output = run_to_end(tmp_path, *command)
    assert code == 0, output
    assert "no TLS" in output


@pytest.mark.slow
def test_one_server_to_a_folder_and_to_a_port(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        address = server.address
        code, output = run_to_end(tmp_path, "--listen", "127.0.0.1:0")
        assert code == 2
        assert "a server runs in" in output
        (tmp_path / "other").mkdir()
        code, output = run_to_end(tmp_path / "other", "--listen", address)
        assert code == 2
        assert f"cannot listen on {address}" in output
        assert server.program.terminate() == 0


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line_and_queues_nothing(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(RUN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words in (("--listen", f"127.0.0.1:{port}"), ("--metrics-port", str(port))):
            code, output = run_to_end(tmp_path, str(config), "--listen", "127.0.0.1:0", *words)
            assert code == 2
            assert len(output.strip().splitlines()) == 1, output
            assert str(port) in output
    listed = subprocess.run(
        [*FEDMPQ, "runs", "--state", str(tmp_path / "state")], capture_output=True, text=True, timeout=SECONDS
    )
    assert "no run yet" in listed.stdout


@pytest.mark.slow
def test_a_run_is_made_once_and_gone_on_with(tmp_path: Path) -> None:
    config = tmp_path / "first.toml"
    config.write_text(RUN)
    with Server(tmp_path, str(config), "--log-format", "json", "--metrics-port", "0") as server:
        assert server.address
        lines = [json.loads(line) for line in server.program.text().splitlines() if line.startswith("{")]
        events = {line["event"]: line for line in lines}
        assert events["run queued"]["run"] == "first"
        url, end, metrics = events["metrics"]["url"], time.monotonic() + SECONDS, ""
        while 'fedmpq_round{run="first"} 0.0' not in metrics:
            assert time.monotonic() < end, metrics
            with urllib.request.urlopen(url, timeout=SECONDS) as page:
                metrics = page.read().decode()
        assert "fedmpq_clients_connected 0.0" in metrics
        assert server.program.terminate() == 0
        server.program.restart()
        assert server.address
        assert server.program.text().count("run queued") == 1
        assert server.program.terminate() == 0
        config.write_text(RUN + "epochs = 3\n")
        code, output = run_to_end(tmp_path, str(config), "--listen", "127.0.0.1:0")
        assert code == 2
        assert "epochs = 5 there and 3 here" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RUN.replace("rounds", "round"), "did you mean 'rounds'"),
        (RUN.replace("digits_cnn", "resnet21"), "no model is called 'resnet21'"),
        (RUN + 'export = ["onx"]\n', "export = 'onx' is none of onnx, executorch"),
        (RUN + 'export = ["no.such:Thing"]\n', "export target 'no.such:Thing' cannot be imported"),
    ],
)
def test_a_bad_run_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    code, output = run_to_end(tmp_path, str(tmp_path / "bad.toml"), "--listen", "127.0.0.1:0")
    assert code == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tls-certificate", "x.pem"), "go together"),
        (("--insecure", "--client-authority", "x.pem"), "--insecure means no TLS"),
        (("--client-authority", "x.pem"), "needs --tls-certificate"),
        (("--tls-certificate", "x.pem", "--tls-key", "x.key"), "or say --no-client-certificates"),
        (("--client-authority", "x.pem", "--no-client-certificates"), "not with --no-client-certificates"),
        (("--max-clients", "0"), "too small"),
        (("--listn", "x"), "did you mean '--listen'"),
        (("--database", "nonsense"), "no database URL"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    code, output = run_to_end(tmp_path, *words)
    assert code == 2
    assert message in output


@pytest.mark.slow
def test_calls_of_a_fleet_that_come_at_once_wait_their_turn() -> None:
    """More than gRPC keeps by itself, while the server is busy with something else."""
    calls, free, port = 3500, threading.Event(), [0]
    listening = threading.Event()

    async def serve() -> None:
        async def answer(request: bytes, _: object) -> bytes:
            return request

        handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
        own = [option for option in OPTIONS if option[0] != "grpc.max_concurrent_streams"]
        server = grpc.aio.server(options=own)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port[0] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        listening.set()
        # The event loop does nothing meanwhile.
        free.wait(60)
        while not all(call.done() for call in asked):
            await asyncio.sleep(0.01)
        await server.stop(0)

    asked: list[Any] = []
    serving = threading.Thread(target=asyncio.run, args=(serve(),))
    serving.start()
    assert listening.wait(60)
    with grpc.insecure_channel(f"127.0.0.1:{port[0]}") as channel:
        echo: Any = channel.unary_unary("/test/Echo")
        asked += [echo.future(b"x", timeout=60) for _ in range(calls)]
        # Longer than they need to be on the server's side; too short a time can only hide a fault.
        time.sleep(1)
        free.set()
        codes = {call.code() for call in asked}
        serving.join(60)
    assert codes == {grpc.StatusCode.OK}
