"""The server exports after the last round, and a board fetches its own model over mutual TLS."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from fedmpq.data.open_source import load
from tests.federation.federation import Federation
from tools.programs import FEDMPQ, Program, wait_for_port

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
