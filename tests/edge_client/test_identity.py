"""The identity file: whole or absent, and for its owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedmpq.edge_client.identity import Identity, IdentityError, checked_name, load_identity, save_identity

IDENTITY = Identity("0123abcd", "very-secret", "board-1", "localhost:50051")


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    assert load_identity(path) is None
    save_identity(path, IDENTITY)
    assert load_identity(path) == IDENTITY
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.json"]


def test_the_file_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    before = os.umask(0)
    try:
        save_identity(path, IDENTITY)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_open_to_others_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.json"
    save_identity(path, IDENTITY)
    path.chmod(mode)
    with pytest.raises(IdentityError) as caught:
        load_identity(path)
    assert f"chmod 600 {path}" in str(caught.value)
    assert f"mode {mode:04o}" in str(caught.value)
    path.chmod(0o600)
    assert load_identity(path) == IDENTITY


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"client_id": "a"}', '{"client_id": 1}', "\xff"])
def test_a_broken_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "identity.json"
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="delete it and enrol again"):
        load_identity(path)


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    save_identity(path, Identity("0123abcd", "", "board-1", "localhost:50051"))
    with pytest.raises(IdentityError, match="empty entry"):
        load_identity(path)


def test_a_write_that_was_cut_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    save_identity(path, IDENTITY)
    (tmp_path / ".identity.json.new").write_bytes(b"half of i")
    assert load_identity(path) == IDENTITY
    other = Identity("f", "another", "board-1", "localhost:50051")
    save_identity(path, other)
    assert load_identity(path) == other


def test_the_secret_is_in_the_metadata_and_in_no_log() -> None:
    assert IDENTITY.metadata == (("authorization", "Bearer 0123abcd.very-secret"),)
    assert "very-secret" not in repr(IDENTITY)


@pytest.mark.parametrize("name", ["a", "board-1", "Board_1.lab", "x" * 64])
def test_names_a_board_may_have(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_names_it_may_not(name: str) -> None:
    with pytest.raises(IdentityError, match="--name"):
        checked_name(name)
