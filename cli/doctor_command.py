"""`fedmpq doctor`: looks for what could go wrong on a board or a server, and says what to do about it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fedmpq.cli.server_command import DEFAULT_LISTEN
from fedmpq.system.findings import Finding

MARKS = {"good": "ok", "warning": "!", "fault": "FAULT"}


class DoctorError(ValueError):
    """Options from which nobody can tell what to look at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Look for what could go wrong, and say what to do about it: on a board with the options that it is "
        "started with, on a server with its folder. Nothing is changed. The exit code is 1 if there is a "
        "fault."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq doctor --server fl.example.org:8470 --bundle ~/camera-1 --data ~/photos\n"
        "  fedmpq doctor --server-state /var/lib/fedmpq"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    board = parser.add_argument_group("a board")
    board.add_argument("--server", metavar="HOST:PORT", help="where its server listens")
    board.add_argument("--bundle", type=Path, metavar="DIR", help="its keys and token")
    board.add_argument("--data", metavar="PATH", help="what it trains on")
    board.add_argument(
        "--state", type=Path, metavar="DIR", help="its folder (default: ~/.local/state/fedmpq)"
    )
    server = parser.add_argument_group("a server")
    server.add_argument("--server-state", type=Path, metavar="DIR", help="the server's folder")
    server.add_argument(
        "--listen", metavar="HOST:PORT", help=f"where it is to listen (default: {DEFAULT_LISTEN})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each thing looked at")


def run_command(arguments: argparse.Namespace) -> int:
    worst = 0
    for finding in _findings(arguments):
        worst = max(worst, int(finding.state == "fault"))
        print(json.dumps(asdict(finding)) if arguments.json else shown(finding), flush=True)
    return worst


def shown(finding: Finding) -> str:
    """A line, and below it what to do."""
    line = f"{MARKS[finding.state]:>5}  {finding.what}: {finding.words}"
    return f"{line}\n       -> {finding.fix}" if finding.fix else line


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    of_board = [arguments.server, arguments.bundle, arguments.data, arguments.state]
    if arguments.server_state is not None:
        if any(each is not None for each in of_board):
            raise DoctorError(
                "--server-state is for a server, the others are for a board: ask for one at a time"
            )
        from fedmpq.server.checkup import server_findings
        from fedmpq.server.state_folder import StateFolder

        return server_findings(StateFolder(arguments.server_state), arguments.listen or DEFAULT_LISTEN)
    if arguments.listen is not None:
        raise DoctorError("--listen is for a server: give its folder with --server-state DIR")
    from fedmpq.edge_client.checkup import BoardPaths, board_findings
    from fedmpq.edge_client.client_process import default_state

    state = arguments.state or default_state()
    return board_findings(BoardPaths(arguments.server, arguments.bundle, state, arguments.data))
