"""Who may enter the folders that hold keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedmpq.system.private_folders import closed_folder, private_folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("make", [private_folder, closed_folder])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_what_is_made_is_private_and_what_was_there_above_stays(tmp_path: Path, make, umask: int) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        assert make(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    finally:
        os.umask(before)
    modes = [mode_of(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o755, 0o700, 0o700]


def test_only_to_close_a_folder_changes_one_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o750)
    private_folder(folder)
    assert mode_of(folder) == 0o750
    closed_folder(folder)
    assert mode_of(folder) == 0o700
