"""One process to a folder, and none that has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq.system.folder_locks import FolderTaken, locked_folder

HOLDER = """
import sys
from pathlib import Path
from fedmpq.system.folder_locks import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderTaken, match=str(tmp_path)), locked_folder(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked_folder(tmp_path):
            pass


def test_it_is_free_again_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with locked_folder(tmp_path):
            pass
