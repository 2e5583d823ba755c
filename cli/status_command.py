"""`fedmpq status`: the run, the round and the clients, once or as they change."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

from rich.live import Live
from rich.text import Text

from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.administration_client import CALL_SECONDS, NotRunning, administration
from fedmpq.server.leading import holder_of
from fedmpq.server.state_folder import StateFolder, add_state_argument
from fedmpq.server.status_report import console, status_facts, status_line, status_table
from fedmpq.server.store.sql import open_store
from fedmpq.server.stored_status import stored_status

NOT_RUNNING = 2
"""Exit code, as for every mistake: a script that asks for the status of a live server has none."""
RETRY_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the run, its round, accuracy and bit-widths, and each client. Where no server runs, what its "
        "folder remembers is shown, and the exit code is 2."
    )
    add_state_argument(parser)
    parser.add_argument("--watch", action="store_true", help="show every change until Ctrl-C")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; with --watch one a line at each change"
    )


def run_command(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    try:
        if arguments.watch:
            return _watch(state, arguments.json)
        with administration(state) as server:
            status = server.GetStatus(pb.GetStatusRequest(), timeout=CALL_SECONDS)
    except NotRunning as reason:
        leader = _show_remembered(state, arguments.json)
        print(f"fedmpq status: {reason}{leader}", file=sys.stderr)
        return NOT_RUNNING
    _show(status, as_json=arguments.json, running=True)
    return 0


def _show(status: pb.ServerStatus, *, as_json: bool, running: bool) -> None:
    if as_json:
        print(json.dumps(status_facts(status, running=running)), flush=True)
    else:
        screen = console(sys.stdout)
        screen.print(status_table(status, screen.width))


def _show_remembered(state: StateFolder, as_json: bool) -> str:
    """Says in words which server leads, where that is another one."""
    if not state.exists:
        return ""
    store = open_store(state.database_url())
    try:
        _show(stored_status(store), as_json=as_json, running=False)
        leader = store.leader()
    finally:
        store.close()
    elsewhere = leader is not None and leader.left > 0 and leader.holder != holder_of(state.path)
    return f"; the one that leads is {leader.holder}" if leader is not None and elsewhere else ""


def _watch(state: StateFolder, as_json: bool) -> int:
    """Until Ctrl-C; a server that restarts is waited for, one that was never there is not."""
    screen = console(sys.stdout)
    redraws = screen.is_terminal and not as_json
    # What is taller than the terminal is cut off: it could not be drawn over.
    live = Live(console=screen, auto_refresh=False, vertical_overflow="crop") if redraws else None
    try:
        with live or nullcontext():
            for status in _changes(state):
                if status is None:
                    _say_lost(state, live)
                elif live is not None:
                    live.update(status_table(status, screen.width), refresh=True)
                elif as_json:
                    _show(status, as_json=True, running=True)
                else:
                    print(status_line(status), flush=True)
    except KeyboardInterrupt:
        pass
    return 0


def _changes(state: StateFolder) -> Iterator[pb.ServerStatus | None]:
    """The status after every change; None each time the server has gone away."""
    seen = False
    while True:
        try:
            with administration(state) as server:
                for status in server.WatchStatus(pb.GetStatusRequest()):
                    seen = True
                    yield status
        except NotRunning:
            if not seen:
                raise
        yield None
        time.sleep(RETRY_SECONDS)


def _say_lost(state: StateFolder, live: Live | None) -> None:
    text = f"the server in {state.path} has stopped; waiting for it to come back"
    if live is not None:
        live.update(Text(text, style="yellow"), refresh=True)
    else:
        print(f"fedmpq status: {text}", file=sys.stderr, flush=True)
