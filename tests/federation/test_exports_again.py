"""A server killed while it exports makes the model files when it starts again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.federation.federation import Federation
from tools.programs import PATIENCE

pytest.importorskip("onnxruntime", reason='exporting needs `pip install "fedmpq[export]"`')


def test_a_killed_servers_exports_are_made_on_its_return(tmp_path: Path) -> None:
    with Federation(tmp_path, (2, 8), {"rounds": 1, "export": ["onnx"]}) as federation:
        server = federation.start_server()
        federation.start_boards()
        end = time.monotonic() + PATIENCE
        while "finished" not in _state(federation):
            assert time.monotonic() < end, server.last_words()
            time.sleep(0.05)
        server.kill()
        exports = federation.state / "exports"
        # What an export has under way is in a folder named so; on a slow machine the kill may come that late.
        assert not [path for path in exports.glob("*/*.onnx") if not path.parent.name.endswith(".partial")]
        federation.start_server()
        federation.finish()
        assert [path.name for path in sorted(exports.glob("*/*.onnx"))] == ["board-0.onnx", "board-1.onnx"]
        assert len(list(exports.iterdir())) == 1


def _state(federation: Federation) -> str:
    """Of the run; nothing before it has begun."""
    try:
        return federation.stored().run.state
    except ValueError:
        return ""
