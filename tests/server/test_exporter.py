"""The server's exporter: a process of its own, whose failures are one line that the server passes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedmpq.server import exporter
from fedmpq.server.exports import ExportFailed, Exports, check_targets
from fedmpq.server.store.records import Run

Capture = pytest.CaptureFixture[str]


def words(state: Path, target: str) -> list[str]:
    return [
        *("make", "--state", str(state), "--run", "garden", "--blobs", str(state / "blobs")),
        *("--target", target, "--out", str(state / "out")),
    ]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("onx", "no export target is called 'onx' (did you mean 'onnx'?); take onnx, executorch"),
        ("no.such:Thing", "export target 'no.such:Thing' cannot be imported: ModuleNotFoundError"),
        ("onnx", "is no server's folder"),
    ],
)
def test_what_fails_is_one_line(target: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    assert exporter.main(words(tmp_path, target)) == exporter.FAILED
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_runtime_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def missing(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

    monkeypatch.setattr(exporter, "read_stored_run", missing)
    assert exporter.main(words(tmp_path, "onnx")) == exporter.FAILED
    assert capsys.readouterr().err == "'onnx' is not installed; install it: pip install \"fedmpq[export]\"\n"


def test_targets_of_ones_own_are_loaded_before_a_run_begins() -> None:
    asyncio.run(check_targets(["onnx", "fedmpq.export.onnx.target:OnnxTarget"]))
    with pytest.raises(ExportFailed, match=r"'fedmpq.export.onnx.target:Onnx' cannot be imported"):
        asyncio.run(check_targets(["onnx", "fedmpq.export.onnx.target:Onnx"]))
    with pytest.raises(ExportFailed, match="is a dict that does not fit: its attribute 'name' is missing"):
        asyncio.run(check_targets(["builtins:dict"]))


def test_the_server_tells_what_the_process_said(tmp_path: Path) -> None:
    run = cast(Run, SimpleNamespace(run_id="0f", ready=3, name="garden"))
    exports = Exports(tmp_path, str(tmp_path / "blobs"))
    with pytest.raises(ExportFailed, match=r"^no export target is called 'onx' \(did you mean 'onnx'\?\)"):
        asyncio.run(exports.make(run, "onx"))
    assert not exports.has(run, "onx")
