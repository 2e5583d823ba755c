"""`fedmpq rollout`: give boards a new model in stages, see which board runs what, pin boards, go back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.table import Table

from fedmpq.cli.runs_command import run_id_of
from fedmpq.cli.status_command import NOT_RUNNING
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.administration_client import (
    CALL_SECONDS,
    START_SECONDS,
    Administration,
    NotRunning,
    administration,
)
from fedmpq.server.rollout_status import rollouts_status
from fedmpq.server.state_folder import StateFolder, add_state_argument
from fedmpq.server.status_report import console
from fedmpq.server.store.sql import open_store

VERBS = {"status": 0, "pin": 2, "unpin": 1, "rollback": 1}
"""How many words follow each."""


class RolloutCommandError(ValueError):
    """Words that name no rollout."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Give the model of a run to boards as a new version: first to some, and to all when those have\n"
        "reported it as good; it is taken back by itself if they report errors."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq rollout night --canary 10% --max-errors 5% --soak 3600\n"
        "  fedmpq rollout status            versions, and which board runs which\n"
        "  fedmpq rollout pin camera-1 3    camera-1 stays at version 3\n"
        "  fedmpq rollout unpin camera-1\n"
        "  fedmpq rollout rollback night    take its newest version back"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "words", nargs="+", metavar="RUN|VERB", help=f"a run's name or id, or one of {', '.join(VERBS)}"
    )
    parser.add_argument(
        "--round", type=int, default=0, metavar="N", help="whose model it is (default: the newest)"
    )
    parser.add_argument(
        "--canary",
        type=_share,
        default=0.1,
        metavar="SHARE",
        help="boards that get it first, such as 10%%, one at least (default: 10%%)",
    )
    parser.add_argument(
        "--max-errors",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="errors above which it is taken back (default: 5%%)",
    )
    parser.add_argument(
        "--soak",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="how long those boards must report it as good before it is for all (default: 3600)",
    )
    parser.add_argument(
        "--format",
        action="append",
        default=[],
        metavar="FORMAT",
        help="a format that boards ask for; may be repeated (default: the run's export, or onnx)",
    )
    add_state_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(arguments: argparse.Namespace) -> int:
    state, words = StateFolder(arguments.state), list(arguments.words)
    verb = words[0]
    if len(words) != 1 + VERBS.get(verb, 0):
        wants = {"pin": "pin BOARD VERSION", "unpin": "unpin BOARD", "rollback": "rollback RUN"}
        raise RolloutCommandError(f"write it as fedmpq rollout {wants.get(verb, verb)}")
    if verb == "status":
        return _status(state, arguments.json)
    with administration(state) as server:
        if verb in ("pin", "unpin"):
            request = pb.PinBoardRequest(name=words[1], version=_version(words[2]) if verb == "pin" else 0)
            _show(server.PinBoard(request, timeout=CALL_SECONDS), as_json=arguments.json)
            return 0
        release = _changed(server, words, arguments)
    if arguments.json:
        print(json.dumps(_facts(release)))
    else:
        print(release_line(release))
    return 0


def _changed(server: Administration, words: Sequence[str], arguments: argparse.Namespace) -> pb.ReleaseStatus:
    if words[0] == "rollback":
        request = pb.RunRequest(run_id=run_id_of(server, words[1]))
        return server.RollBack(request, timeout=CALL_SECONDS)
    start = pb.StartRolloutRequest(
        run_id=run_id_of(server, words[0]),
        round=max(0, arguments.round),
        canary=arguments.canary,
        max_errors=arguments.max_errors,
        soak_seconds=arguments.soak,
        formats=arguments.format,
    )
    return server.StartRollout(start, timeout=START_SECONDS)


def release_line(release: pb.ReleaseStatus) -> str:
    """One version in a line."""
    words = f"version {release.version} (run {release.run}, round {release.round}): "
    if release.state == "canary":
        return f"{words}canary on {release.canary} boards, {release.good} report it as good"
    reason = f"; {release.reason}" if release.reason else ""
    return f"{words}{release.state.replace('_', ' ')}{reason}"


def _status(state: StateFolder, as_json: bool) -> int:
    try:
        with administration(state) as server:
            status = server.GetRollouts(pb.GetRolloutsRequest(), timeout=CALL_SECONDS)
    except NotRunning as reason:
        if state.exists:
            _show(_remembered(state), as_json=as_json)
        print(f"fedmpq rollout: {reason}", file=sys.stderr)
        return NOT_RUNNING
    _show(status, as_json=as_json)
    return 0


def _remembered(state: StateFolder) -> pb.RolloutsStatus:
    store = open_store(state.database_url())
    try:
        return rollouts_status(store)
    finally:
        store.close()


def _show(status: pb.RolloutsStatus, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_facts(status)))
    elif not status.releases:
        print("no version yet; fedmpq rollout RUN makes one")
    else:
        for release in status.releases:
            print(release_line(release))
        console(sys.stdout).print(boards_table(status.boards))


def boards_table(boards: Sequence[pb.BoardModel]) -> Table:
    """Who runs what, and what it says of it; names are never shortened."""
    table = Table(box=None, pad_edge=False)
    table.add_column("board", no_wrap=True)
    for name in ("format", "runs", "is to run", "ok", "errors"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for board in boards:
        pinned = f"pinned to {board.pinned}" if board.pinned else ""
        table.add_row(
            board.name,
            board.format or "-",
            str(board.version or "-"),
            str(board.wanted or "-"),
            str(board.ok),
            str(board.errors),
            "; ".join(words for words in (pinned, board.reason) if words),
        )
    return table


def _facts(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _version(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise RolloutCommandError(f"{text!r} is no version; give its number, such as 3")
    return int(text)


def _share(text: str) -> float:
    """10% or 0.1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 10% or 0.1")
    return share
