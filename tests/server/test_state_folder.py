"""The server's folder: where things are and who may enter."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedmpq.server.state_folder import StateError, StateFolder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_is_there_is_closed_to_others(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    state.path.mkdir(0o755)
    state.create()
    assert mode_of(state.path) == 0o700
    state.tls.mkdir()
    state.path.chmod(0o755)
    state.create()
    assert mode_of(state.path) == 0o700


def test_the_database_is_in_the_folder_unless_it_was_told_another(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    assert state.database_url() == f"sqlite:///{tmp_path / 'fedmpq.db'}"
    assert not state.exists
    for url in ("postgresql://me:secret@db/one", "postgresql://me:secret@db/two"):
        state.remember_database(url)
        assert state.database_url() == url
    assert mode_of(tmp_path / "database") == 0o600
    assert state.exists


def test_the_socket_has_an_absolute_path_while_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert StateFolder(Path("x")).admin_target() == f"unix:{tmp_path}/x/admin.sock"
    deep = Path("d" * 70)
    assert StateFolder(deep).admin_target() in (
        f"unix:{tmp_path / deep}/admin.sock",
        f"unix:{deep}/admin.sock",
    )
    with pytest.raises(StateError, match=r"too long for a socket .* at most 107"):
        StateFolder(Path("d" * 110)).admin_target()
