"""The server exports after the last round, and a board fetches its own model over mutual TLS."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedmpq.cli.main import main
from fedmpq.data.open_source import load
from tests.federation.federation import Federation
from tools.programs import FEDMPQ, PATIENCE, Program, wait_for_port

pytest.importorskip("onnxruntime", reason='exporting needs `pip install "fedmpq[export]"`')


OWN_TARGET = """
from fedmpq.export.onnx.target import OnnxTarget

class Garden(OnnxTarget):
    name = "garden"
    suffix = ".garden"
"""


def test_a_board_fetches_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a file of the operator's own kind; but a board cannot have the server load other code."""
    (tmp_path / "garden_target.py").write_text(OWN_TARGET, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"rounds": 2, "epochs": 2, "export": ["onnx", "garden_target:Garden"]}
    with Federation(tmp_path, (2, 8), settings) as federation:
        federation.start_server()
        federation.start_boards()
        federation.finish()
        exports = sorted((federation.state / "exports").glob("*/*.onnx"))
        assert [path.name for path in exports] == ["board-0.onnx", "board-1.onnx"]
        _serve_again(federation)
        out = tmp_path / "models"
        assert _fetch(federation, 1, out, "onnx") == str(out / "board-1.onnx")
        assert _fetch(federation, 1, out, "garden_target:Garden") == str(out / "board-1.garden")
        assert "does not export to 'json:tool'" in _fetch(federation, 1, out, "json:tool")
        assert (out / "board-1.garden").read_bytes() == (out / "board-1.onnx").read_bytes()
        _check_model(out / "board-1.onnx", exports[1], tmp_path / "parts" / "test.npz")


@pytest.mark.slow
def test_a_version_reaches_boards_that_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real programs, files and checks: first one of the boards takes it, and then the other."""
    with Federation(tmp_path, (2, 8), {"rounds": 1, "export": ["onnx"]}) as federation:
        federation.start_server()
        federation.start_boards()
        federation.finish()
        _serve_again(federation)
        state = ["--state", str(federation.state)]
        run = federation.stored().run.name
        assert main(["rollout", run, "--canary", "50%", "--soak", "0", *state]) == 0
        assert "canary on 1 boards" in capsys.readouterr().out
        for number in (0, 1):
            federation.boards[number] = _follow(federation, number)
        end = time.monotonic() + PATIENCE
        while [board["version"] for board in _rollouts(state, capsys)["boards"]] != [1, 1]:
            assert time.monotonic() < end, federation.boards[0].last_words()
            time.sleep(0.2)
        assert _rollouts(state, capsys)["releases"][0]["state"] == "full"
        for exported in (federation.state / "exports").glob("*/*.onnx"):
            current = tmp_path / f"models-{exported.stem}" / "current.onnx"
            assert current.read_bytes() == exported.read_bytes()


def _rollouts(state: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["rollout", "status", "--json", *state]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def _follow(federation: Federation, number: int) -> Program:
    name = federation.name(number)
    words = ["client", "--server", f"localhost:{federation.port}", "--fetch-model", "onnx", "--follow"]
    words += ["--bundle", str(federation.state / "bundles" / name), "--every", "0.5", "--retry-most", "1"]
    words += ["--state", str(federation.folder / name), "-o", str(federation.folder / f"models-{name}")]
    return Program([*FEDMPQ, *words], federation.folder / f"{name}-follows.log")


def _serve_again(federation: Federation) -> None:
    """Without a run to do, so that it stays."""
    words = ["server", "--state", str(federation.state), "--listen", f"127.0.0.1:{federation.port}"]
    federation.server = Program([*FEDMPQ, *words], federation.folder / "again.log")
    wait_for_port(federation.port, federation.server)


def _fetch(federation: Federation, number: int, out: Path, wanted: str) -> str:
    """What the client prints: the file it got, or why it did not get any."""
    bundle, state = federation.state / "bundles", federation.folder / f"board-{number}"
    words = ["--bundle", str(bundle / federation.name(number)), "--state", str(state), "-o", str(out)]
    server = ["--server", f"localhost:{federation.port}", "--fetch-model", wanted]
    done = subprocess.run([*FEDMPQ, "client", *server, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def _check_model(path: Path, exported: Path, test_file: Path) -> None:
    """The very file the server made, its card, and as accurate as the card says."""
    from fedmpq.export.onnx.runtime import OnnxRunner

    card = json.loads(path.with_name(f"{path.name}.json").read_text())
    assert path.read_bytes() == exported.read_bytes()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card["sha256"]
    assert card["clients"] == [1]
    test = load(test_file, "test")
    right = OnnxRunner(path).logits(test.images).argmax(axis=1) == test.labels
    assert right.mean() == pytest.approx(card["accuracy"])
