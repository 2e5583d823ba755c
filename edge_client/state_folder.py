"""Where a client keeps what must survive a crash:

identity.json   who the client is to the server (identity.py)
graphs/         the graph of the run, under its id
downloads/      the model of the round, perhaps in part
outbox/         the update or calibration of the round, until the server's receipt (outbox.py)
"""

from __future__ import annotations

import os
from pathlib import Path

from fedmpq.edge_client.identity import FILE_NAME
from fedmpq.edge_client.outbox import Outbox
from fedmpq.system.durable_files import flush
from fedmpq.system.folder_locks import FolderTaken, lock_folder
from fedmpq.system.private_folders import private_folder


class StateError(RuntimeError):
    """A state folder that cannot be used."""


class StateFolder:
    """The folder and its parts; one process at a time may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._lock = _locked(folder)
        self.identity = folder / FILE_NAME
        self.graphs = private_folder(folder / "graphs")
        self.downloads = private_folder(folder / "downloads")
        self.outbox = Outbox(_renamed(folder / "mailbox", folder / "outbox"))

    def close(self) -> None:
        os.close(self._lock)


def _renamed(old: Path, new: Path) -> Path:
    """The folder had another name before, under which an update may still wait for its delivery."""
    if old.is_dir() and not new.exists():
        old.rename(new)
        flush(new.parent)
    return new


def _locked(folder: Path) -> int:
    try:
        return lock_folder(folder)
    except FolderTaken:
        raise StateError(
            f"another client uses the state folder {folder}; give this one its own --state DIR"
        ) from None
