"""Where a client keeps what must survive a crash:

identity.json   who the client is to the server (identity.py)
graphs/         the graph of the run, under its id
downloads/      the model of the round, perhaps in part
outbox/         the update or calibration of the round, until the server's receipt (outbox.py)
lock            held by the process that uses the folder
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fedmpq.edge_client.identity import FILE_NAME
from fedmpq.edge_client.outbox import Outbox
from fedmpq.system.durable_files import OWNER_ONLY, flush
from fedmpq.system.private_folders import private_folder


class StateError(RuntimeError):
    """A state folder that cannot be used."""


class StateFolder:
    """The folder and its parts; one process at a time may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._lock = _locked(folder / "lock")
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


def _locked(path: Path) -> int:
    """The descriptor of a locked file; the system unlocks it however the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(
            f"another client uses the state folder {path.parent}; give this one its own --state DIR"
        ) from None
    return descriptor
