"""`fedmpq server RUN.toml` serves runs to clients; `fedmpq server init|token|...`: who may join."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmpq.server.state_folder import StateFolder, add_state_argument

SECURITY_ACTIONS = ("init", "token", "bundle", "limit", "rename", "revoke")
"""The keys of `security_commands.ACTIONS`, here without what these import."""
DEFAULT_LISTEN = "127.0.0.1:8470"
DEFAULT_MAX_CLIENTS = 10_000
DEFAULT_LEASE, MOST_LEASE = 15.0, 3600.0


class CommandError(ValueError):
    """Options that do not go together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve federated runs, one after the other, to the clients that connect."
    parser.epilog = (
        "fedmpq server init, token, bundle, limit, rename and revoke manage keys and access; each has its "
        "own --help."
    )
    _add_serving_arguments(parser)
    parse_serving = parser.parse_known_args

    def parse(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        if words and words[0] in SECURITY_ACTIONS:
            return _parse_action(parser, words), []
        return parse_serving(words, namespace)

    # What follows `server` is either a file or one of a few verbs, which argparse has no way to say.
    parser.parse_known_args = parse  # type: ignore[method-assign, assignment]


def _parse_action(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    from fedmpq.cli.security_commands import ACTIONS

    action = ACTIONS[words[0]]
    own = type(parser)(prog=f"{parser.prog} {words[0]}")
    action.add_arguments(own)
    arguments = own.parse_args(words[1:])
    arguments.action = action
    return arguments


def _add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN.toml",
        help="runs to begin or go on with; runs of earlier starts that have not ended go on anyway",
    )
    add_state_argument(parser)
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where boards reach the server; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--role",
        choices=("all", "front", "leader"),
        default="all",
        help="one server does all; or any number of front-ends, which boards connect to, beside one leader, "
        "on one PostgreSQL database (default: %(default)s)",
    )
    parser.add_argument("--exit-when-done", action="store_true", help="end when no run is left")
    _add_security_arguments(parser)
    parser.add_argument(
        "--database", metavar="URL", help="keep the store in PostgreSQL: postgresql://USER@HOST/NAME"
    )
    parser.add_argument(
        "--blobs", metavar="URL", help="folder or fsspec URL for payloads (default: in the state folder)"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics on this port of loopback; 0 takes a free one",
    )
    parser.add_argument(
        "--dashboard",
        metavar="[HOST:]PORT",
        help="show it in the browser, with buttons; a port alone is loopback's, 0 takes a free one",
    )
    parser.add_argument(
        "--max-clients",
        type=int,
        default=DEFAULT_MAX_CLIENTS,
        metavar="N",
        help="connected at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--lease",
        type=float,
        default=DEFAULT_LEASE,
        metavar="S",
        help="seconds after which a server that stands by takes over from one that is gone "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the lines on standard error"
    )


def _add_security_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-certificate",
        type=Path,
        metavar="PEM",
        help="the server's certificate (default: what fedmpq server init made)",
    )
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="its key")
    parser.add_argument(
        "--client-authority",
        type=Path,
        metavar="PEM",
        help="clients must show a certificate signed by it (default: the authority init made; with "
        "certificates of your own there is none)",
    )
    parser.add_argument(
        "--no-client-certificates",
        action="store_true",
        help="TLS without certificates of clients: a token and an identity alone let them in",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS, even where others can reach the server"
    )


def run_command(arguments: argparse.Namespace) -> int:
    if hasattr(arguments, "action"):
        code: int = arguments.action.run(arguments)
        return code
    return _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    from fedmpq.server.run_config import read_config
    from fedmpq.server.serve import run_server
    from fedmpq.server.server_settings import ServerSettings, check_listen
    from fedmpq.system import logs

    if arguments.max_clients < 1:
        raise CommandError(f"--max-clients {arguments.max_clients} is too small; the least is 1")
    if not 1 <= arguments.lease <= MOST_LEASE:
        raise CommandError(f"--lease {arguments.lease:g} is outside 1..{MOST_LEASE:g} seconds")
    if arguments.role == "front":
        _check_front(arguments)
    state = StateFolder(arguments.state)
    settings = ServerSettings(
        state=state,
        listen=arguments.listen,
        tls=_tls(arguments, state),
        insecure=arguments.insecure,
        runs=tuple(read_config(path) for path in arguments.runs),
        exit_when_done=arguments.exit_when_done,
        blobs=arguments.blobs,
        metrics_port=arguments.metrics_port,
        max_clients=arguments.max_clients,
        lease_seconds=arguments.lease,
        role=arguments.role,
    )
    check_listen(settings)
    if arguments.database:
        _use_database(state, arguments.database, arguments.role)
    logs.log_events(arguments.log_format)
    if arguments.dashboard is None:
        return run_server(settings)
    return _with_dashboard(state, arguments.dashboard, lambda: run_server(settings))


def _check_front(arguments: argparse.Namespace) -> None:
    """What the leader does is asked of the leader."""
    given = {
        "RUN.toml": arguments.runs,
        "--exit-when-done": arguments.exit_when_done,
        "--dashboard": arguments.dashboard is not None,
        "--metrics-port": arguments.metrics_port is not None,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise CommandError(f"{wrong[0]} is for the leader; leave it out of --role front")


def _use_database(state: StateFolder, url: str, role: str) -> None:
    """One that is refused is not remembered: it would be in the way of every later start."""
    from fedmpq.server.database import make_engine, open_database

    state.create()
    # A front-end leaves the tables to the leader, and waits for it.
    (make_engine if role == "front" else open_database)(url).dispose()
    state.remember_database(url)


def _with_dashboard(state: StateFolder, listen: str, serve: Callable[[], int]) -> int:
    from fedmpq.dashboard.serving import serving_beside

    with serving_beside(state, listen) as served:
        print(f"fedmpq server {served.words}", flush=True)
        return serve()


def _tls(arguments: argparse.Namespace, state: StateFolder) -> Any:
    """From the options, or else from the state folder if `fedmpq server init` made certificates there."""
    from fedmpq.server.server_settings import TlsSettings

    if arguments.insecure:
        if arguments.tls_certificate or arguments.tls_key or arguments.client_authority:
            raise CommandError("--insecure means no TLS; leave it out, or leave out the certificates")
        return None
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise CommandError("--tls-certificate and --tls-key go together")
    authority: Path | None = arguments.client_authority
    if authority is not None and arguments.no_client_certificates:
        raise CommandError(
            "--client-authority asks for certificates of clients; not with --no-client-certificates"
        )
    if arguments.tls_certificate is not None:
        if authority is None and not arguments.no_client_certificates:
            raise CommandError(
                "--tls-certificate and --tls-key need --client-authority PEM, which signed the clients' "
                "certificates; or say --no-client-certificates to let clients in without one"
            )
        return TlsSettings(arguments.tls_certificate, arguments.tls_key, authority)
    if authority is None and not arguments.no_client_certificates:
        authority = state.tls / "ca.pem"
    made = TlsSettings(state.tls / "server.pem", state.tls / "server.key", authority)
    if made.certificate.exists():
        return made
    if arguments.client_authority is not None:
        raise CommandError("--client-authority needs --tls-certificate and --tls-key")
    return None
