"""The server exports after the last round, and a board fetches its own model over mutual TLS."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from fedmpq.data.dataset import load
from tests.federation.federation import Federation
from tools.programs import FEDMPQ, Program, wait_for_port

pytest.importorskip("onnxruntime", reason='exporting needs `pip install "fedmpq[export]"`')


def test_a_board_fetches_its_own_model(tmp_path: Path) -> None:
    settings = {"rounds": 2, "epochs": 2, "export": ["onnx"]}
    with Federation(tmp_path, (2, 8), settings) as federation:
        federation.start_server()
        federation.start_boards()
        federation.finish()
        exports = sorted((federation.state / "exports").glob("*/*.onnx"))
        assert [path.name for path in exports] == ["board-0.onnx", "board-1.onnx"]
        _serve_again(federation)
        out = tmp_path / "models"
        _fetch(federation, 1, out)
        _check_model(out / "board-1.onnx", exports[1], tmp_path / "parts" / "test.npz")


def _serve_again(federation: Federation) -> None:
    """Without a run to do, so that it stays."""
    words = ["server", "--state", str(federation.state), "--listen", f"127.0.0.1:{federation.port}"]
    federation.server = Program([*FEDMPQ, *words], federation.folder / "again.log")
    wait_for_port(federation.port, federation.server)


def _fetch(federation: Federation, number: int, out: Path) -> None:
    bundle, state = federation.state / "bundles", federation.folder / f"board-{number}"
    words = ["--bundle", str(bundle / federation.name(number)), "--state", str(state), "-o", str(out)]
    server = ["--server", f"localhost:{federation.port}", "--fetch-model", "onnx"]
    done = subprocess.run([*FEDMPQ, "client", *server, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / f"board-{number}.onnx")


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
