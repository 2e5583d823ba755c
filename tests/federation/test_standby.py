"""Two servers on one PostgreSQL: the second takes over from a leader that is paused and refused later."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedmpq.server.leading import DEPOSED, holder_of
from tests.databases import running_postgres
from tests.federation.federation import Federation, assert_same
from tools.programs import FEDMPQ, Program, free_port, listens, wait_for_port, wait_until
from tools.tcp_proxy import Proxy


@pytest.fixture
def database() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url.render_as_string(hide_password=False)


KILLS = int(os.environ.get("FEDMPQ_TEST_KILLS", "2"))
"""Of leaders in one run; more take some ten seconds each."""


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


@pytest.mark.slow
def test_leaders_are_killed_at_any_moment(tmp_path: Path, database: str) -> None:
    words = ["--blobs", str(tmp_path / "blobs"), "--lease", "3"]
    random = np.random.default_rng(KILLS)
    with Federation(tmp_path, (2, 8), {"rounds": 3 * KILLS}, database) as federation:
        first = federation.start_server(*words)
        port, second = standby(federation, words)
        servers = {federation.port: first, port: second}
        with first, second, Proxy(federation.port) as balancer:
            federation.start_boards(balancer.port)
            killed = 0
            for _ in range(KILLS):
                time.sleep(random.uniform(0, 4))
                leading = balancer.target
                if not servers[leading].running:
                    break
                servers[leading].kill()
                servers[leading].restart()
                killed += 1
                # Whoever is quicker: the one that stood by, or the killed one, which knows its own lease.
                wait_until(lambda: any(map(listens, servers)), "a leader", list(servers.values()))
                balancer.target = next(filter(listens, servers))
                balancer.cut()
            assert killed == KILLS, f"the run was over after {killed} of {KILLS} kills: it has too few rounds"
            for board in federation.boards.values():
                assert board.wait() == 0, board.last_words()
            federation.server = servers[balancer.target]
            assert_same(federation.finish(), federation.simulated())
            assert "Traceback" not in first.text() + second.text()
