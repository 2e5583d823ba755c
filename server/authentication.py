"""Who calls: the identity in the call's metadata, and the certificate the connection was made with."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc

from fedmpq.server.batched import Batched
from fedmpq.server.refusals import Context, refuse
from fedmpq.server.store.protocol import Enrolment
from fedmpq.server.store.records import Client

_BEARER = re.compile(r"Bearer ([0-9a-f]{32})\.([A-Za-z0-9_-]{43})", re.ASCII)
_SECRET_BYTES = 32


def make_secret() -> str:
    """43 letters, digits, "-" and "_": 256 random bits."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def secret_hash(secret: str) -> bytes:
    """What is kept of a secret; 256 random bits cannot be searched, so it needs no salt or work factor."""
    return hashlib.sha256(secret.encode()).digest()


class Authentication:
    """Asks the store at every call, so that who was revoked is refused from the next one on; calls that come
    together are one question."""

    def __init__(self, store: Enrolment) -> None:
        self._store = store
        self._clients: Batched[str, Client | None] = Batched(self._find)
        self._first_calls: Batched[str, None] = Batched(self._mark_seen)

    async def _find(self, client_ids: Sequence[str]) -> list[Client | None]:
        known = await asyncio.to_thread(self._store.clients_by_id, set(client_ids))
        return [known.get(client_id) for client_id in client_ids]

    async def _mark_seen(self, client_ids: Sequence[str]) -> list[None]:
        await asyncio.to_thread(self._store.mark_seen, client_ids, time.time())
        return [None] * len(client_ids)

    async def client(self, context: Context) -> Client:
        """The client that calls; anyone else is refused before anything of the call is read."""
        match = _BEARER.fullmatch(_header(context.invocation_metadata(), "authorization"))
        if match is None:
            await refuse(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                "no identity: send the metadata authorization: Bearer CLIENT_ID.SECRET, or enrol first",
            )
        client = await self._clients.ask(match[1])
        if client is None or not hmac.compare_digest(client.secret_hash, secret_hash(match[2])):
            await refuse(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                "no such identity, or it was revoked: enrol again with a valid token",
            )
        if client.certificate_name is not None and certificate_name(context) != client.certificate_name:
            await refuse(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"client {client.name!r} enrolled with the certificate of {client.certificate_name!r}: use"
                " that",
            )
        if client.first_seen is None:
            await self._first_calls.ask(client.client_id)
        return client


def certificate_name(context: Context) -> str | None:
    """Common name of the client's certificate; None without mutual TLS."""
    names: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    common = next(iter(names.get("x509_common_name", ())), None)
    return None if common is None else common.decode(errors="replace")


def certificate_ends(context: Context) -> float | None:
    """Until when the client's certificate is valid, in seconds since 1970; None without mutual TLS."""
    facts: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    shown = next(iter(facts.get("x509_pem_cert", ())), None)
    if shown is None:
        return None
    # Not before a board shows one: a restart is to be quick.
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate(shown).not_valid_after_utc.timestamp()


def _header(metadata: Any, name: str) -> str:
    for key, value in metadata or ():
        if key == name and isinstance(value, str):
            return value
    return ""
