"""Enrolment tokens: what a board shows once to get an identity of its own.

A token is 32 random bytes, written `fmq_` and 43 letters, digits, "-" and "_". It is shown when it is made,
never again: the server keeps the SHA-256 of the text. Nobody can guess or search 256 random bits, so the hash
needs no salt and no work factor. A token's id is the first 12 hexadecimal digits of that hash: no secret,
and who finds a token can say which to revoke.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits

PREFIX = "fmq_"
"""Lets people and secret scanners see what a string is that turns up where it should not."""
DEFAULT_DAYS = 30.0
MAX_DAYS = 36500.0
MAX_USES = 1_000_000
_RANDOM_BYTES = 32
_ID_DIGITS = 12
_TEXT = re.compile(r"fmq_[A-Za-z0-9_-]{43}", re.ASCII)


class TokenError(ValueError):
    """A token that cannot be made or revoked."""


@dataclass(frozen=True)
class TokenRecord:
    """What the server keeps of a token."""

    token_id: str
    digest: bytes
    created: datetime
    uses_left: int | None
    """None: any number."""
    expires: datetime | None
    """None: never."""
    client_name: str | None = None
    """The only client that may enrol with it; None: any."""
    revoked: bool = False
    limits: ClaimLimits = UNLIMITED
    """Of the clients that enrol with it."""

    def refusal(self, name: str, now: datetime) -> str | None:
        """Why the client called `name` cannot enrol with this token at `now`; None if it can."""
        state = self.state(now)
        if state == "expired":
            return f"the token expired on {self.expires:%Y-%m-%d}"
        if state != "valid":
            return {"revoked": "the token was revoked", "used": "the token is used up"}[state]
        if self.client_name is not None and name != self.client_name:
            return f"the token is for the client {self.client_name!r}"
        return None

    def state(self, now: datetime) -> str:
        """In one word: "valid", "revoked", "expired" or "used"."""
        if self.revoked:
            return "revoked"
        if self.expires is not None and now >= self.expires:
            return "expired"
        return "used" if self.uses_left is not None and self.uses_left < 1 else "valid"


@dataclass(frozen=True)
class NewToken:
    """A token just made; `text` is for its holder and is kept nowhere."""

    text: str
    record: TokenRecord


def make_token(
    now: datetime,
    *,
    uses: int | None = 1,
    days: float | None = DEFAULT_DAYS,
    client_name: str | None = None,
    limits: ClaimLimits = UNLIMITED,
) -> NewToken:
    """A token good for `uses` enrolments (None: any number) during `days` (None: for ever)."""
    if uses is not None and not 1 <= uses <= MAX_USES:
        raise TokenError(f"a token cannot be for {uses} uses; take 1 to {MAX_USES}, or --many")
    if days is not None and not 0 < days <= MAX_DAYS:
        raise TokenError(f"a token cannot be valid for {days:g} days; take more than 0, at most {MAX_DAYS:g}")
    text = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    expires = None if days is None else now + timedelta(days=days)
    digest = token_digest(text)
    record = TokenRecord(token_id_of(digest), digest, now, uses, expires, client_name, limits=limits)
    return NewToken(text, record)


def token_digest(text: str) -> bytes:
    """SHA-256 of the text: all that is kept of a token, and what it is found by."""
    return hashlib.sha256(text.encode()).digest()


def token_id_of(digest: bytes) -> str:
    return digest.hex()[:_ID_DIGITS]


def looks_like_token(text: str) -> bool:
    """Whether it has the form of one; what has not need not be looked up."""
    return _TEXT.fullmatch(text) is not None
