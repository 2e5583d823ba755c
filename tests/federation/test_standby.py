"""Two servers on one PostgreSQL: the second takes over from a leader that is paused and refused later."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmpq.server.leading import holder_of
from fedmpq.server.serve import DEPOSED
from tests.databases import running_postgres
from tests.federation.federation import Federation, assert_same
from tools.programs import FEDMPQ, Program, free_port, wait_for_port
from tools.tcp_proxy import Proxy


@pytest.fixture
def database() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url.render_as_string(hide_password=False)


def standby(federation: Federation, words: list[str]) -> tuple[int, Program]:
    """A server with the same keys and configuration in a folder of its own."""
    state, port = federation.folder / "standby", free_port()
    state.mkdir(mode=0o700)
    shutil.copy(federation.state / "database", state / "database")
    shutil.copytree(federation.state / "tls", state / "tls")
    command = ["server", str(federation.folder / "parts" / "run.toml"), "--state", str(state)]
    command += ["--listen", f"127.0.0.1:{port}", "--exit-when-done", *words]
    return port, Program([*FEDMPQ, *command], federation.folder / "standby.log")


@pytest.mark.slow
def test_who_stands_by_takes_over_from_a_paused_leader(tmp_path: Path, database: str) -> None:
    words = ["--blobs", str(tmp_path / "blobs"), "--lease", "8"]
    with Federation(tmp_path, (2, 8), {"rounds": 6}, database) as federation:
        leader = federation.start_server(*words)
        port, second = standby(federation, words)
        with second, Proxy(federation.port) as balancer:
            second.wait_for("standing by")
            told = subprocess.run(
                [*FEDMPQ, "status", "--state", str(tmp_path / "standby")], capture_output=True, text=True
            )
            assert told.returncode == 2
            assert f"; the one that leads is {holder_of(federation.state)}" in told.stderr
            federation.start_boards(balancer.port)
            leader.wait_for("round merged run=parts round=2 ")
            leader.process.send_signal(signal.SIGSTOP)
            second.wait_for("leading epoch=2")
            wait_for_port(port, second)
            balancer.target = port
            balancer.cut()
            second.wait_for("client connected")
            leader.process.send_signal(signal.SIGCONT)
            assert leader.wait() == DEPOSED, leader.last_words()
            assert "deposed reason=" in leader.text()
            federation.server = second
            assert_same(federation.finish(), federation.simulated())
            assert "Traceback" not in leader.text() + second.text()
