"""`fedmpq dashboard`: runs in the browser, of a server's folder and of simulations."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedmpq.server.state_folder import DEFAULT_STATE

DEFAULT_LISTEN = "127.0.0.1:8480"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show runs in the browser: accuracy, bit-widths, bytes, seconds, boards and models. Nothing can be "
        "changed here; fedmpq server --dashboard PORT has buttons. Beyond this machine it serves with the "
        "server's certificate, and asks for the operator's token."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq dashboard                             the server in ./fedmpq-server\n"
        "  fedmpq dashboard runs/a runs/b               simulations, side by side\n"
        "  fedmpq dashboard fedmpq-server --listen 0.0.0.0:8480"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[DEFAULT_STATE],
        metavar="FOLDER",
        help=f"a server's folder or a simulation's (default: {DEFAULT_STATE})",
    )
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where browsers reach it; port 0 takes a free one (default: %(default)s)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    from fedmpq.dashboard.serving import serve_folders

    serve_folders(arguments.folders, arguments.listen)
    return 0
