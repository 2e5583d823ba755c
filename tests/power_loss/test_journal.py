"""The journal and the disk that follows it, on files whose fate is known."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.power_loss.journal import CUTS, Disk, build, environment, read_journal

WRITES = """
import os, socket
from pathlib import Path
from fedmpq.system.durable_files import write_durably

folder = Path(os.environ["WATCHED_FOLDER"])
(folder / "lost").write_bytes(b"not flushed")
write_durably(folder / "kept", b"flushed")
write_durably(folder / "changed", b"first")
with (folder / "changed").open("r+b") as file:
    file.write(b"SECOND")
    file.flush()
    os.truncate(folder / "changed", 3)
(folder / "kept").rename(folder / "moved")
(folder / "new").mkdir()
(folder / "new" / "inside").write_bytes(b"x")
near, far = socket.socketpair()
near.sendall(b"told")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("library"))


def followed(library: Path, folder: Path) -> Disk:
    journal = folder.parent / "journal"
    folder.mkdir()
    watched = {**os.environ, **environment(library, folder, journal)}
    subprocess.run([sys.executable, "-c", WRITES], env=watched, check=True)
    records = list(read_journal(journal))
    assert records[-1].data == b"told"
    disk = Disk(folder)
    for record in records:
        disk.follow(record)
    return disk


def left(disk: Disk, target: Path, cut: str) -> dict[str, bytes]:
    target.mkdir()
    disk.after_power_cut(next(one for one in CUTS if one == cut), target, random.Random(0))
    return {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}


def test_what_was_not_flushed_is_lost(library: Path, tmp_path: Path) -> None:
    disk = followed(library, tmp_path / "disk")
    # The flush of the folder for the file "kept" has made the name of "lost" sure too, though not its bytes.
    assert left(disk, tmp_path / "a", "dropped") == {"kept": b"flushed", "changed": b"first", "lost": b""}
    names = {"moved": b"flushed", "changed": b"first", "lost": b"", "new/inside": b""}
    assert left(disk, tmp_path / "b", "names") == names


def test_a_machine_that_ends_in_order_loses_nothing(library: Path, tmp_path: Path) -> None:
    disk = followed(library, tmp_path / "disk")
    disk.flush_all()
    there = {
        str(path.relative_to(tmp_path / "disk")): path.read_bytes()
        for path in (tmp_path / "disk").rglob("*")
        if path.is_file()
    }
    assert there == {"moved": b"flushed", "changed": b"SEC", "lost": b"not flushed", "new/inside": b"x"}
    for cut in CUTS:
        assert left(disk, tmp_path / cut, cut) == there, cut


def test_a_full_disk_takes_nothing_more(library: Path, tmp_path: Path) -> None:
    folder, full = tmp_path / "disk", tmp_path / "full"
    folder.mkdir()
    full.touch()
    script = "import os; open(os.path.join(os.environ['WATCHED_FOLDER'], 'x'), 'wb')"
    watched = {**os.environ, **environment(library, folder, full=full)}
    done = subprocess.run([sys.executable, "-c", script], env=watched, capture_output=True, text=True)
    assert "No space left on device" in done.stderr
    full.unlink()
    subprocess.run([sys.executable, "-c", script], env=watched, check=True)
