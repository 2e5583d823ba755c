"""What the board's script says where it cannot make a board; that it can is tests/arm's to show."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tools import arm_board
from tools.arm_board import Board, BoardError, NotDebianError


def on(monkeypatch: pytest.MonkeyPatch, **release: str) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)


def test_another_system_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ID="fedora", PRETTY_NAME="Fedora 44")
    with pytest.raises(NotDebianError, match=r"made of Debian's packages, and this is Fedora 44"):
        arm_board.make(tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ID="debian")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(NotDebianError, match="by apt-get and dpkg-deb: not found"):
        arm_board.make(tmp_path / "board")


def test_a_failing_step_shows_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ID="debian")
    monkeypatch.setattr(shutil, "which", lambda tool: "/usr/bin/true")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool, line in (("dpkg", "echo amd64"), ("apt-get", "echo no mirror >&2; exit 100")):
        (tools / tool).write_text(f"#!/bin/sh\n{line}\n", encoding="ascii")
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(BoardError, match=r"apt-get .* update failed:\nno mirror"):
        arm_board.make(tmp_path / "board")
    assert not (tmp_path / "board" / "made_by").exists()


def test_an_unknown_cpu_is_named() -> None:
    with pytest.raises(BoardError, match="no board with a 'cortex-m0'; take cortex-a72 or cortex-a76"):
        Board(Path("board")).launcher("cortex-m0")
