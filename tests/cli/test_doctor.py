"""`fedmpq doctor` on boards and servers that are well, and on such that are not."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedmpq.cli.main import main
from fedmpq.edge_client import checkup
from fedmpq.edge_client.checkup import BoardPaths, board_findings
from fedmpq.server.checkup import server_findings
from fedmpq.server.state_folder import StateFolder
from fedmpq.system import findings
from fedmpq.system.findings import DAY, Finding

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's folder with a bundle for one board."""
    folder = tmp_path_factory.mktemp("doctor") / "server"
    assert main(["server", "init", "--state", str(folder)]) == 0
    assert main(["server", "bundle", "cam", "--state", str(folder)]) == 0
    return folder


@contextmanager
def answering(state: Path) -> Iterator[int]:
    """A server of this folder's certificates that shakes hands with boards of its authority, and waits."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(state / "tls" / "server.pem", state / "tls" / "server.key")
    context.load_verify_locations(state / "tls" / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_shake, args=(listening, context), daemon=True).start()
        yield listening.getsockname()[1]


def _shake(listening: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)
        except OSError:
            connection.close()


def found(paths: BoardPaths, now: float | None = None) -> dict[str, Finding]:
    return {each.what: each for each in board_findings(paths, now)}


def test_a_board_that_is_well(state: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.zeros(2, np.int64))
    with answering(state) as port:
        paths = BoardPaths(
            f"localhost:{port}", state / "bundles" / "cam", tmp_path / "own", str(tmp_path / "data.npz")
        )
        seen = found(paths)
    assert {name for name, each in seen.items() if each.state == "fault"} == set()
    assert seen["server"].words == "localhost answers with TLS, and both sides know each other"
    assert "the bundle has a token" in seen["identity"].words
    assert seen["certificate"].words.startswith("good until")
    assert not (tmp_path / "own").exists(), "nothing is changed"


def test_what_is_wrong_with_a_board_is_named_with_its_fix(state: Path, tmp_path: Path) -> None:
    bundle = state / "bundles" / "cam"
    late = time.time() + 400 * DAY
    with answering(state) as port:
        other = tmp_path / "stranger"
        assert main(["server", "init", "--state", str(other)]) == 0
        assert main(["server", "bundle", "cam", "--state", str(other)]) == 0
        stranger = found(BoardPaths(f"localhost:{port}", other / "bundles" / "cam", tmp_path / "own", None))
        assert "not to be trusted here" in stranger["server"].words
        ended = found(BoardPaths(None, bundle, tmp_path / "own", str(tmp_path / "nothing")), late)
    assert ended["certificate"].state == "fault"
    assert ended["certificate"].fix.endswith("fedmpq server bundle cam --overwrite")
    assert ended["data"].state == "fault"
    early = found(BoardPaths(None, bundle, tmp_path / "own", None), 1e9)
    assert early["clock"].state == early["certificate"].state == "fault"
    assert "timedatectl" in early["clock"].fix
    away = found(BoardPaths("127.0.0.1:1", None, tmp_path / "own", None))
    assert "does not answer" in away["server"].words
    unknown = found(BoardPaths("no.such.name.invalid:8470", None, tmp_path / "own", None))
    assert unknown["name"].state == "fault"
    (tmp_path / "half").mkdir()
    half = found(BoardPaths(None, tmp_path / "half", tmp_path / "own", None))
    assert half["keys"].words.endswith("has no ca.pem")


def test_too_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkup, "available_memory", lambda: 50 << 20)
    seen = found(BoardPaths(None, None, tmp_path, None))
    assert seen["memory"].state == "fault"
    assert findings.disk(tmp_path, 1 << 60, 1 << 61).state == "fault"
    assert findings.disk(tmp_path, 0, 1 << 61).state == "warning"


def test_a_server_that_is_well_and_one_that_is_not(state: Path, tmp_path: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = {each.what: each for each in server_findings(StateFolder(state), listen)}
    assert busy["server"].words.endswith("is taken")
    assert {name for name, each in busy.items() if each.state == "fault"} == {"server"}
    assert "localhost" in busy["hosts"].words
    (state / "tls" / "server.key").chmod(0o644)
    late = {each.what: each for each in server_findings(StateFolder(state), listen, time.time() + 360 * DAY)}
    (state / "tls" / "server.key").chmod(0o600)
    assert late["key"].state == "fault"
    assert late["certificate"].state == "warning"
    assert "--renew" in late["certificate"].fix
    capsys.readouterr()
    assert main(["doctor", "--server-state", str(tmp_path / "nowhere"), "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[-1]["fix"] == f"fedmpq server init --state {tmp_path / 'nowhere'}"


def test_a_damaged_database_is_a_fault(state: Path, tmp_path: Path) -> None:
    broken = tmp_path / "server"
    assert main(["server", "init", "--state", str(broken)]) == 0
    (broken / "fedmpq.db").write_bytes(b"no database" * 1000)
    seen = {each.what: each for each in server_findings(StateFolder(broken), "127.0.0.1:1")}
    assert seen["database"].state == "fault"


def test_options_of_a_board_and_a_server_do_not_mix(capsys: Capture, tmp_path: Path) -> None:
    assert main(["doctor", "--server-state", str(tmp_path), "--server", "a:1"]) == 2
    assert "one at a time" in capsys.readouterr().err
    assert main(["doctor", "--listen", "127.0.0.1:1"]) == 2
    assert "--server-state DIR" in capsys.readouterr().err
