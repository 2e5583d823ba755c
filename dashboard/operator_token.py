"""The operator's token: what a browser must show before a button does anything.

It lies in the state folder, `operator-token`, which only its owner may enter. Who can read it there can do
the same with `fedmpq runs` over the server's socket, so it is kept as it is. Deleting the file and starting
the server again makes a new one.
"""

from __future__ import annotations

import hmac
import re
import secrets
from pathlib import Path

from fedmpq.server.state_folder import StateFolder
from fedmpq.system.durable_files import create_durably

FILE_NAME = "operator-token"
PREFIX = "fmo_"
_RANDOM_BYTES = 32
_BEARER = re.compile(r"Bearer (fmo_[A-Za-z0-9_-]{43})", re.ASCII)


class TokenFileError(ValueError):
    """A file that holds no token."""


def token_file(state: StateFolder) -> Path:
    return state.path / FILE_NAME


def operator_token(state: StateFolder) -> str:
    """The folder's token, made now if it has none."""
    path = token_file(state)
    if not path.exists():
        create_durably(path, f"{PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}\n".encode())
    text = path.read_text(encoding="utf-8").strip()
    if _BEARER.fullmatch(f"Bearer {text}") is None:
        raise TokenFileError(f"{path} holds no operator's token; delete it, and a new one is made")
    return text


def is_shown(header: str, token: str) -> bool:
    """Whether a request's Authorization header has the token; takes as long for every wrong one."""
    match = _BEARER.fullmatch(header)
    return match is not None and hmac.compare_digest(match[1], token)
