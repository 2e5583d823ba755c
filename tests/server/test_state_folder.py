"""The server's folder: where things are, who may enter, and files that are whole or absent."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedmpq.server.state_folder import StateError, StateFolder
from fedmpq.system.private_files import private_folder, write_private


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


def test_folders_above_that_were_there_stay_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path / "a" / "b")
    assert [mode_of(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [
        0o755,
        0o700,
        0o700,
    ]


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


def test_a_file_is_never_seen_by_others_nor_lost_by_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_private(path, b"first")
    assert (path.read_bytes(), mode_of(path)) == (b"first", 0o600)
    with pytest.raises(FileExistsError):
        write_private(path, b"second")
    assert path.read_bytes() == b"first"
    path.chmod(0o644)
    write_private(path, b"third", overwrite=True)
    assert (path.read_bytes(), mode_of(path)) == (b"third", 0o600)
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_what_stands_in_the_way_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"untouched")
    link = tmp_path / "key"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        write_private(link, b"new")
    write_private(link, b"new", overwrite=True)
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"untouched", b"new", False)
