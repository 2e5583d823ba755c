"""Who may join, as the operator changes it: bundles for boards, and the end of a client's identity.

Both work on the state folder and the store, whether the server runs or not; a running one sees the change at
the next call that a client makes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fedmpq.server import certificates, tokens
from fedmpq.server.blobs import Uploads
from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits
from fedmpq.server.names import NAME
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.protocol import Store
from fedmpq.system.durable_files import write_durably
from fedmpq.system.private_folders import closed_folder

BUNDLE_FILES = ("ca.pem", "client.pem", "client.key", "token")


class AccessError(ValueError):
    """A request that would undo something, or is about something that is not there."""


@dataclass(frozen=True)
class BundleRequest:
    """How long what is in a bundle is good for, and how much its holder may claim."""

    days: int = certificates.DEFAULT_DAYS
    """Of the certificate."""
    token_days: float = tokens.DEFAULT_DAYS
    """The time that the board has to enrol."""
    limits: ClaimLimits = UNLIMITED
    overwrite: bool = False
    """Take the place of bundles that are there."""


@dataclass(frozen=True)
class Revoked:
    """What ended with a client."""

    name: str
    client_id: str | None
    """None: it never enrolled."""
    revoked_tokens: list[str]
    """Ids of tokens made for it that could still have been used."""


def make_bundles(
    state: StateFolder, store: Store, names: Iterable[str], request: BundleRequest
) -> list[Path]:
    """Folders STATE/bundles/NAME: the authority, a certificate, its key, and a token for that name."""
    wanted = list(dict.fromkeys(names))
    # All are looked at before the first one is made.
    for name in wanted:
        folder = state.bundles / certificates.checked_client_name(name)
        if folder.exists() and not request.overwrite:
            raise AccessError(f"{folder} is there; --overwrite makes a new one in its place")
    authority = certificates.read_authority(state.tls)
    for name in wanted:
        _revoke_tokens_of(store, name)
        client = certificates.issue_client(authority, name, request.days)
        token = tokens.make_token(_now(), days=request.token_days, client_name=name, limits=request.limits)
        store.add_token(token.record)
        _write_bundle(state, name, authority, client, token.text)
    return [state.bundles / name for name in wanted]


def _write_bundle(
    state: StateFolder,
    name: str,
    authority: certificates.Authority,
    client: certificates.Issued,
    token: str,
) -> None:
    closed_folder(state.bundles)
    folder = closed_folder(state.bundles / name)
    write_durably(folder / "ca.pem", certificates.pem_of(authority.certificate))
    client.write(folder, "client", overwrite=True)
    write_durably(folder / "token", f"{token}\n".encode())


def revoke_clients(state: StateFolder, store: Store, names: Sequence[str]) -> list[Revoked]:
    """Ends the clients' identities, the tokens made for them and their bundles."""
    wanted = list(dict.fromkeys(names))
    # All are looked at before the first one is revoked.
    for name in wanted:
        _require_known(store, name)
    return [_revoke(state, store, name) for name in wanted]


def rename_client(store: Store, name: str, wanted: str) -> None:
    """The client keeps everything but its name."""
    if not NAME.fullmatch(wanted):
        raise AccessError(f"{wanted[:80]!r} is no name: take 1 to 64 letters, digits and '_.-'")
    if not store.rename_client(name, wanted):
        raise no_client(store, name)


def no_client(store: Store, name: str, beside: str = "") -> AccessError:
    """What is said of a name that no client has."""
    known = ", ".join(client.name for client in store.list_clients()) or "none"
    return AccessError(f"there is no client {name!r}{beside}; enrolled are: {known}")


def _revoke(state: StateFolder, store: Store, name: str) -> Revoked:
    client_id = store.revoke_client(name, time.time())
    revoked = _revoke_tokens_of(store, name)
    _remove_bundle(state, name)
    if client_id is not None and state.uploads.exists():
        Uploads(state.uploads).forget(client_id)
    return Revoked(name, client_id, revoked)


def _require_known(store: Store, name: str) -> None:
    clients = [client.name for client in store.list_clients()]
    if name not in clients and not _tokens_of(store, name):
        raise no_client(store, name, " and no unused token for it")


def _tokens_of(store: Store, name: str) -> list[str]:
    """Ids of those made for this client that could still be used."""
    records = (record for record in store.list_tokens() if record.client_name == name)
    return [record.token_id for record in records if record.state(_now()) == "valid"]


def _revoke_tokens_of(store: Store, name: str) -> list[str]:
    ids = _tokens_of(store, name)
    for token_id in ids:
        store.revoke_token(token_id, time.time())
    return ids


def _remove_bundle(state: StateFolder, name: str) -> None:
    if not certificates.is_client_name(name):
        # Enrolled with a token under a name that no bundle can have.
        return
    folder = state.bundles / name
    for file in BUNDLE_FILES:
        (folder / file).unlink(missing_ok=True)
    # What else someone put there is not ours to delete.
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _now() -> datetime:
    return datetime.now(timezone.utc)
