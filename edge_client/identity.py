"""Who this client is to the server: given once at enrolment, kept in a file that only its owner can read."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fedmpq.system.durable_files import write_durably

FILE_NAME = "identity.json"
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_OTHERS = 0o077


class IdentityError(ValueError):
    """An identity that is missing, unreadable or open to others."""


@dataclass(frozen=True)
class Identity:
    """What the server gave at enrolment, and which server it was."""

    client_id: str
    secret: str = field(repr=False)
    name: str
    server: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries to prove who it comes from."""
        return (("authorization", f"Bearer {self.client_id}.{self.secret}"),)


def load_identity(path: Path) -> Identity | None:
    """The identity at `path`; None if there is no file, an error if others could have read it."""
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None
    if mode & _OTHERS:
        raise IdentityError(
            f"{path} holds this client's secret and others may read it (mode {mode:04o}, must be 0600): "
            f"run chmod 600 {path}, or delete it and enrol again if you do not trust them"
        )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        values = {entry.name: stored[entry.name] for entry in fields(Identity)}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise IdentityError(f"{path} is no identity file: delete it and enrol again with a token") from None
    if not all(isinstance(value, str) and value for value in values.values()):
        raise IdentityError(f"{path} has an empty entry: delete it and enrol again with a token")
    return Identity(**values)


def save_identity(path: Path, identity: Identity) -> None:
    write_durably(path, json.dumps(asdict(identity), indent=2).encode() + b"\n")


def checked_name(name: str) -> str:
    """The name unchanged, if a client may have it."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise IdentityError(
            f"a client cannot be called {name!r}; give a --name of letters, digits and '_.-', "
            f"beginning with a letter or digit, at most {MAX_NAME}"
        )
    return name
