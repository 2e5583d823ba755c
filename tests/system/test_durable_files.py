"""Files that are whole or absent: after an error, after a crash, and for whoever looks meanwhile."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedmpq.system.durable_files import (
    HASH_BLOCK,
    append_durably,
    create_durably,
    file_digest,
    move_durably,
    remove_durably,
    replacing,
    write_all_durably,
    write_durably,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the disk, in order: "file" and "folder" flushed, "name" given or taken."""
    done: list[str] = []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file")
        fsync(descriptor)

    def noted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            done.append("name")
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("replace", "hardlink_to"):
        monkeypatch.setattr(Path, name, noted(getattr(Path, name)))
    return done


def test_the_bytes_are_on_the_disk_before_their_name_and_the_name_before_the_return(
    tmp_path: Path, steps: list[str]
) -> None:
    def steps_of(work: Callable[[], object]) -> list[str]:
        steps.clear()
        work()
        return list(steps)

    one, two = tmp_path / "one", tmp_path / "two"
    assert steps_of(lambda: write_durably(one, b"1")) == ["file", "name", "folder"]
    assert steps_of(lambda: create_durably(two, b"2")) == ["file", "name", "folder"]
    assert steps_of(lambda: move_durably(one, two)) == ["file", "name", "folder"]
    assert steps_of(lambda: append_durably(one, b"3")) == ["file", "folder"]
    assert steps_of(lambda: append_durably(one, b"4")) == ["file"]
    assert steps_of(lambda: remove_durably(two)) == ["folder"]
    assert (names_in(tmp_path), one.read_bytes()) == (["one"], b"34")


def test_what_need_not_be_durable_is_not_flushed(tmp_path: Path, steps: list[str]) -> None:
    with replacing(tmp_path / "file", durable=False) as file:
        file.write(b"whole")
    assert (steps, (tmp_path / "file").read_bytes()) == (["name"], b"whole")


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    with replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")
    assert path.read_bytes() == b"new"


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")

    def break_off() -> None:
        with replacing(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert (names_in(tmp_path), path.read_bytes()) == (["file"], b"old")


def test_a_crash_leaves_the_old_file_and_the_next_write_tidies_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    crash = (
        "import os, sys\nfrom pathlib import Path\nfrom fedmpq.system.durable_files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n    file.write(b'ne')\n    file.flush()\n    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", crash, str(path)]).returncode == 9
    assert (names_in(tmp_path), path.read_bytes()) == ([".file.partial", "file"], b"old")
    write_durably(path, b"new")
    assert (names_in(tmp_path), path.read_bytes()) == (["file"], b"new")


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o277])
def test_a_private_file_is_its_owners_alone_and_another_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_durably(tmp_path / "private", b"")
        create_durably(tmp_path / "created", b"")
        with replacing(tmp_path / "private-block") as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        write_durably(tmp_path / "shared", b"", private=False)
    finally:
        os.umask(before)
    assert {mode_of(tmp_path / name) for name in ("private", "created", "private-block")} == {0o600}
    assert mode_of(tmp_path / "shared") == 0o666 & ~umask


def test_a_file_that_others_could_read_is_closed_by_writing_it_anew(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_durably(path, b"new")
    assert (path.read_bytes(), mode_of(path)) == (b"new", 0o600)


def test_to_create_never_replaces(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_durably(path, b"first")
    with pytest.raises(FileExistsError):
        create_durably(path, b"second")
    assert (names_in(tmp_path), path.read_bytes()) == (["key"], b"first")


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "key"
    target.write_bytes(b"untouched")
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        create_durably(link, b"new")
    write_durably(link, b"new")
    assert (target.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"untouched", b"new", False)


@pytest.mark.parametrize("size", [0, 1, HASH_BLOCK, HASH_BLOCK + 1])
def test_a_digest_is_that_of_all_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "file").write_bytes(data)
    assert file_digest(tmp_path / "file") == hashlib.sha256(data).digest()


def test_several_files_are_flushed_before_any_has_its_name(tmp_path: Path, steps: list[str]) -> None:
    files = {tmp_path / str(number): bytes([number]) * 9 for number in range(5)}
    (tmp_path / "3").write_bytes(b"older")
    (tmp_path / ".4.partial").write_bytes(b"of a crash")
    with ThreadPoolExecutor(3) as flushers:
        write_all_durably(files, flushers)
    assert steps == ["file"] * 5 + ["name"] * 5 + ["folder"]
    assert names_in(tmp_path) == list("01234")
    assert all(path.read_bytes() == data and mode_of(path) == 0o600 for path, data in files.items())


def test_several_files_that_cannot_be_flushed_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").write_bytes(b"older")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with ThreadPoolExecutor(3) as flushers, pytest.raises(OSError, match="no space"):
        write_all_durably({tmp_path / "1": b"new", tmp_path / "2": b"new"}, flushers)
    assert names_in(tmp_path) == ["1"]
    assert (tmp_path / "1").read_bytes() == b"older"
