"""What an operator does about keys and access: `fedmpq server init`, `token`, `bundle`, `limit`,
`rename` and `revoke`.

They work on the state folder and the store directly, whether the server runs or not; a running one sees the
change at the next call that a client makes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from fedmpq.server import certificates, tokens
from fedmpq.server.access import (
    AccessError,
    BundleRequest,
    make_bundles,
    no_client,
    rename_client,
    revoke_clients,
)
from fedmpq.server.certificates import TlsFiles
from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.database import open_database
from fedmpq.server.state_folder import DEFAULT_STATE, StateFolder, add_state_argument
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import open_store


@dataclass(frozen=True)
class Action:
    """What follows `fedmpq server`: `add_arguments` to its own parser, then `run`."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@contextmanager
def _store(state: StateFolder) -> Iterator[Store]:
    store = open_store(state.database_url())
    try:
        yield store
    finally:
        store.close()


def _now() -> datetime:
    return datetime.now(timezone.utc)


# init


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a server's folder: a development authority, the server's certificate, the store, and one "
        "enrolment token, printed here and nowhere else."
    )
    add_state_argument(parser)
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address boards reach the server by; may be repeated (localhost is always in)",
    )
    _add_days(parser, "certificate", certificates.DEFAULT_DAYS)
    parser.add_argument(
        "--database", metavar="URL", help="keep the store in PostgreSQL: postgresql://USER@HOST/NAME"
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--renew",
        action="store_true",
        help="in a folder made before: a new server certificate from the same authority",
    )
    again.add_argument(
        "--overwrite",
        action="store_true",
        help="in a folder made before: a new authority too, so that every board needs a new bundle",
    )
    _add_json(parser)


def _run_init(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    files = TlsFiles(state.tls)
    if arguments.renew:
        return _renew(state, files, arguments)
    there = next((path for path in files.all if path.exists()), None)
    if there is not None and not arguments.overwrite:
        raise AccessError(
            f"{there} is there; --renew makes a new server certificate with the authority that boards know, "
            "--overwrite makes a new authority too"
        )
    authority = certificates.make_authority()
    server = certificates.issue_server(authority, arguments.host, arguments.days)
    state.create()
    if arguments.database:
        # One that is refused is not remembered: it would be in the way of every later start.
        open_database(arguments.database).dispose()
        state.remember_database(arguments.database)
    with _store(state) as store:
        certificates.write_authority(authority, state.tls, overwrite=arguments.overwrite)
        server.write(state.tls, "server", overwrite=arguments.overwrite)
        token = tokens.make_token(_now())
        store.add_token(token.record)
    if arguments.json:
        _print_json({**_server_facts(state, files), "token": _token_facts(token.record, token.text)})
        return 0
    _describe_server(state, files)
    _describe_token(token)
    print(f"a board's files: fedmpq server bundle NAME{_state_option(state)}")
    print(f"to begin:        fedmpq server run.toml{_state_option(state)}")
    return 0


def _renew(state: StateFolder, files: TlsFiles, arguments: argparse.Namespace) -> int:
    state.require()
    authority = certificates.read_authority(state.tls)
    hosts = arguments.host or certificates.hosts_of(certificates.read_certificate(files.certificate))
    certificates.issue_server(authority, hosts, arguments.days).write(state.tls, "server", overwrite=True)
    if arguments.json:
        _print_json(_server_facts(state, files))
        return 0
    _describe_server(state, files)
    print("restart the server to use it")
    return 0


def _server_facts(state: StateFolder, files: TlsFiles) -> dict[str, Any]:
    certificate = certificates.read_certificate(files.certificate)
    return {
        "state": str(state.path),
        "hosts": certificates.hosts_of(certificate),
        "certificate_ends": certificate.not_valid_after_utc.isoformat(),
    }


def _describe_server(state: StateFolder, files: TlsFiles) -> None:
    certificate = certificates.read_certificate(files.certificate)
    print(f"folder:          {state.path} (only its owner may enter)")
    print(f"certificate:     {', '.join(certificates.hosts_of(certificate))}")
    print(f"                 until {certificate.not_valid_after_utc:%Y-%m-%d}")


# token


def _add_token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make an enrolment token and print it, once; or list or revoke those there are."
    add_state_argument(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--uses", type=int, metavar="N", help="good for N enrolments (default: 1)")
    what.add_argument("--many", action="store_true", help="good for any number of enrolments")
    what.add_argument("--list", action="store_true", help="the tokens there are; never their text")
    what.add_argument("--revoke", metavar="ID", help="nobody enrols with it any more; those who did stay")
    _add_days(parser, "token", tokens.DEFAULT_DAYS)
    _add_limits(parser)
    _add_json(parser)


def _run_token(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    state.require()
    with _store(state) as store:
        if arguments.list:
            _list_tokens(store, arguments.json)
        elif arguments.revoke is not None:
            _revoke_token(store, arguments.revoke, arguments.json)
        else:
            uses = None if arguments.many else 1 if arguments.uses is None else arguments.uses
            token = tokens.make_token(_now(), uses=uses, days=arguments.days, limits=_limits(arguments))
            store.add_token(token.record)
            if arguments.json:
                _print_json(_token_facts(token.record, token.text))
            else:
                _describe_token(token)
    return 0


def _list_tokens(store: Store, as_json: bool) -> None:
    records = store.list_tokens()
    if as_json:
        _print_json({"tokens": [_token_facts(record) for record in records]})
        return
    if not records:
        print("no tokens; fedmpq server token makes one")
        return
    print(f"{'ID':<12}  {'STATE':<7}  {'USES LEFT':<9}  {'ENDS':<10}  FOR")
    for record in records:
        uses = "any" if record.uses_left is None else str(record.uses_left)
        ends = "never" if record.expires is None else f"{record.expires:%Y-%m-%d}"
        who = ", ".join(filter(None, (record.client_name or "any client", str(record.limits))))
        print(f"{record.token_id:<12}  {record.state(_now()):<7}  {uses:<9}  {ends:<10}  {who}")


def _revoke_token(store: Store, token_id: str, as_json: bool) -> None:
    if not store.revoke_token(token_id, time.time()):
        raise AccessError(f"there is no token {token_id!r}; --list shows those there are")
    if as_json:
        _print_json({"revoked_tokens": [token_id]})
    else:
        print(f"token {token_id} revoked; clients that enrolled with it stay")


def _token_facts(record: tokens.TokenRecord, text: str | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": record.token_id,
        "state": record.state(_now()),
        "uses_left": record.uses_left,
        "ends": None if record.expires is None else record.expires.isoformat(),
        "client": record.client_name,
        **asdict(record.limits),
    }
    return facts if text is None else {**facts, "token": text}


def _describe_token(token: tokens.NewToken) -> None:
    record = token.record
    uses = "any number of clients" if record.uses_left is None else f"{record.uses_left} enrolment(s)"
    ends = "" if record.expires is None else f", until {record.expires:%Y-%m-%d}"
    print(f"token:           {token.text}")
    print(f"                 id {record.token_id}, for {uses}{ends}; it is not shown again")
    if str(record.limits):
        print(f"                 of each client at most {record.limits} count")


# bundle


def _add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make what each board needs to join over mutual TLS, in STATE/bundles/NAME: the authority, a "
        "certificate and its key, and a token that enrols this one name, once."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="the board's name")
    add_state_argument(parser)
    _add_days(parser, "certificate", certificates.DEFAULT_DAYS)
    parser.add_argument(
        "--token-days",
        type=float,
        default=tokens.DEFAULT_DAYS,
        metavar="N",
        help=f"days the board has to enrol (default: {tokens.DEFAULT_DAYS:g})",
    )
    _add_limits(parser)
    parser.add_argument("--overwrite", action="store_true", help="take the place of bundles that are there")
    _add_json(parser)


def _run_bundle(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    state.require()
    request = BundleRequest(arguments.days, arguments.token_days, _limits(arguments), arguments.overwrite)
    with _store(state) as store:
        made = [str(folder) for folder in make_bundles(state, store, arguments.names, request)]
    if arguments.json:
        _print_json({"bundles": made})
        return 0
    print("\n".join(made))
    print("copy each folder to its board, delete it here, and on the board run:")
    print("  fedmpq client --server HOST:PORT --bundle FOLDER --budget BITS --data DIR")
    return 0


# limit


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say how much of what clients claim of themselves counts, from their next round on. What is not "
        "given is not limited any more."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="the client's name")
    add_state_argument(parser)
    _add_limits(parser)
    _add_json(parser)


def _run_limit(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    state.require()
    limits, names = _limits(arguments), list(dict.fromkeys(arguments.names))
    with _store(state) as store:
        enrolled = {client.name for client in store.list_clients()}
        if unknown := [name for name in names if name not in enrolled]:
            raise no_client(store, unknown[0])
        for name in names:
            store.limit_client(name, limits)
    if arguments.json:
        _print_json({"limited": [{"name": name, **asdict(limits)} for name in names]})
    else:
        print(
            "\n".join(f"{name}: {f'at most {limits} count' if str(limits) else 'no limit'}" for name in names)
        )
    return 0


# rename


def _add_rename_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Give a client another name, in every list, card and history from now on. It keeps its identity, its "
        "certificate and its place in runs; nothing has to be done on the board."
    )
    parser.add_argument("name", metavar="NAME", help="the client's name")
    parser.add_argument("wanted", metavar="NEW", help="what it is to be called")
    add_state_argument(parser)
    _add_json(parser)


def _run_rename(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    state.require()
    with _store(state) as store:
        rename_client(store, arguments.name, arguments.wanted)
    if arguments.json:
        _print_json({"renamed": {"from": arguments.name, "to": arguments.wanted}})
    else:
        print(f"{arguments.name} is {arguments.wanted} now")
    return 0


# revoke


def _add_revoke_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "End a client's identity, the tokens made for it and its bundle. Its calls are refused from now on; "
        "its name is free for a new bundle."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="the client's name")
    add_state_argument(parser)
    _add_json(parser)


def _run_revoke(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    state.require()
    with _store(state) as store:
        facts = [asdict(one) for one in revoke_clients(state, store, arguments.names)]
    if arguments.json:
        _print_json({"revoked": facts})
        return 0
    for fact in facts:
        identity = "identity" if fact["client_id"] else "no identity, for it never enrolled"
        print(f"{fact['name']}: revoked {identity}; unused tokens revoked: {len(fact['revoked_tokens'])}")
    return 0


# Shared


def _add_days(parser: argparse.ArgumentParser, what: str, default: float) -> None:
    parser.add_argument(
        "--days",
        type=type(default),
        default=default,
        metavar="N",
        help=f"how long the {what} is good for (default: {default:g})",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-samples", type=int, metavar="N", help="of the samples a client claims, no more than N count"
    )
    parser.add_argument(
        "--max-budget", type=float, metavar="BITS", help="a client is dealt no more bits per weight than this"
    )


def _limits(arguments: argparse.Namespace) -> ClaimLimits:
    return ClaimLimits(arguments.max_samples, arguments.max_budget)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _state_option(state: StateFolder) -> str:
    return "" if state.path == DEFAULT_STATE else f" --state {state.path}"


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts))


ACTIONS = {
    "init": Action("make the folder, an authority and a certificate", _add_init_arguments, _run_init),
    "token": Action("make, list or revoke enrolment tokens", _add_token_arguments, _run_token),
    "bundle": Action("make the files a board needs to join", _add_bundle_arguments, _run_bundle),
    "limit": Action("say how much of what clients claim counts", _add_limit_arguments, _run_limit),
    "rename": Action("give a client another name", _add_rename_arguments, _run_rename),
    "revoke": Action("end a client's identity", _add_revoke_arguments, _run_revoke),
}
