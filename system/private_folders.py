"""Folders that only their owner may enter: keys, tokens, the state of a server or of a client."""

from __future__ import annotations

from pathlib import Path

from fedmpq.system.durable_files import flush

OWNER_ONLY = 0o700


def private_folder(folder: Path) -> Path:
    """Makes `folder` and the missing ones above it with mode 0700; those that are there stay as they are.

    A power cut does not take away a folder that was made, and with it all that was flushed in there since.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(OWNER_ONLY, exist_ok=True)
        # The umask may have taken the owner's own rights away.
        path.chmod(OWNER_ONLY)
        flush(path.parent)
    return folder


def closed_folder(folder: Path) -> Path:
    """Like `private_folder`, but a `folder` that is there gets mode 0700 too; those above it stay."""
    private_folder(folder).chmod(OWNER_ONLY)
    return folder


def is_open_to_others(path: Path) -> bool:
    """Whether anyone but its owner may read, write or enter it."""
    return bool(path.stat().st_mode & 0o077)
