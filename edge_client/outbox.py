"""The update or calibration that waits to be delivered; it survives a crash, so no work is done twice.

FOLDER/<SHA-256 of the update>.update    the UpdatePayload or CalibrationPayload
FOLDER/pending.json                      which round it answers; written last, removed first
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from fedmpq.exchange.messages import Phase
from fedmpq.system.durable_files import file_digest, flush, remove_durably, replacing, write_durably
from fedmpq.system.private_folders import private_folder

_SUFFIX = ".update"
log = logging.getLogger("fedmpq.client")


class RoundKey(NamedTuple):
    """Names one assignment; the server may send the same one several times."""

    run_id: str
    round: int
    phase: Phase
    payload: bytes
    """SHA-256 of the model that was to be trained or measured."""


@dataclass(frozen=True)
class Pending:
    """An update on the disk."""

    key: RoundKey
    payload: bytes
    """SHA-256 of the update."""
    size: int
    path: Path


class Outbox:
    """Holds at most one update: a client is in one round at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)
        self._index = folder / "pending.json"
        self._settling: threading.Thread | None = None

    def put(self, key: RoundKey, update: bytes, *, wait: bool = True) -> Pending:
        """Keeps `update` in the place of any other; it is durable when this returns, or, if nobody waits for
        that, soon: its delivery may begin meanwhile, and one that a crash ends first is made again."""
        self.clear()
        payload = hashlib.sha256(update).digest()
        pending = Pending(key, payload, len(update), self._folder / f"{payload.hex()}{_SUFFIX}")
        with replacing(pending.path, durable=False) as file:
            file.write(update)
        if wait:
            self._settle(pending)
        else:
            self._settling = threading.Thread(target=self._settle_if_it_can, args=(pending,))
            self._settling.start()
        return pending

    def _settle(self, pending: Pending) -> None:
        key = pending.key
        flush(pending.path)
        flush(self._folder)
        record = {
            "run_id": key.run_id,
            "round": key.round,
            "phase": key.phase,
            "model": key.payload.hex(),
            "update": pending.payload.hex(),
            "bytes": pending.size,
        }
        write_durably(self._index, json.dumps(record).encode())

    def _settle_if_it_can(self, pending: Pending) -> None:
        try:
            self._settle(pending)
        except OSError as error:
            # It is on its way to the server all the same.
            log.warning("an answer is not kept for after a crash: %s", error)

    def _settled(self) -> None:
        """When nothing is being made durable any more."""
        if self._settling is not None:
            self._settling.join()
            self._settling = None

    def pending(self) -> Pending | None:
        """The update that waits; one that the disk has not kept whole is thrown away."""
        self._settled()
        pending = self._read_index()
        if pending is None or not _is_whole(pending):
            self.clear()
            return None
        return pending

    def clear(self) -> None:
        self._settled()
        if self._index.exists():
            remove_durably(self._index)
        for path in self._folder.glob(f"*{_SUFFIX}*"):
            path.unlink(missing_ok=True)

    def _read_index(self) -> Pending | None:
        try:
            record = json.loads(self._index.read_text(encoding="utf-8"))
            if (phase := record["phase"]) not in get_args(Phase):
                return None
            key = RoundKey(str(record["run_id"]), int(record["round"]), phase, bytes.fromhex(record["model"]))
            payload = bytes.fromhex(record["update"])
            size = int(record["bytes"])
        except (FileNotFoundError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return None
        return Pending(key, payload, size, self._folder / f"{payload.hex()}{_SUFFIX}")


def _is_whole(pending: Pending) -> bool:
    try:
        return file_digest(pending.path) == pending.payload and pending.path.stat().st_size == pending.size
    except FileNotFoundError:
        return False
