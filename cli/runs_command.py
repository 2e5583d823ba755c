"""`fedmpq runs`: the runs there are; pause, resume, abort or start one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from fedmpq.cli.status_command import NOT_RUNNING
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.administration_client import (
    CALL_SECONDS,
    START_SECONDS,
    Administration,
    NotRunning,
    administration,
)
from fedmpq.server.state_folder import StateFolder, add_state_argument
from fedmpq.server.status_report import console, run_facts, run_line, runs_table
from fedmpq.server.store.sql import open_store
from fedmpq.server.stored_status import stored_run

VERBS = ("pause", "resume", "abort", "start", "set")
DEFAULT = "default"
"""`runs set NAME key=default` takes a value back."""


class RunsError(ValueError):
    """A request that names no run, or more than one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the runs of a server, the newest first; or change one."
    parser.epilog = (
        "examples:\n"
        "  fedmpq runs\n"
        "  fedmpq runs start night.toml   queue it after the runs there are\n"
        "  fedmpq runs pause              let the open round of the run at work finish, then wait\n"
        "  fedmpq runs resume\n"
        "  fedmpq runs abort RUN          end it now; what was merged stays\n"
        "  fedmpq runs set RUN deadline_seconds=900 quorum=0.8    from the next decision on\n"
        "  fedmpq runs set RUN rounds=80  more rounds, also for a run that is finished\n"
        "  fedmpq runs set RUN deadline_seconds=default"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    parser.add_argument(
        "target",
        nargs="?",
        metavar="RUN|FILE",
        help="id, beginning of the id, or name of a run; start: a TOML file",
    )
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="set: settings as in a run.toml, or KEY=default"
    )
    add_state_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(arguments: argparse.Namespace) -> int:
    state = StateFolder(arguments.state)
    if arguments.verb is None:
        return _list(state, arguments.json)
    if arguments.target is None and arguments.verb in ("abort", "start", "set"):
        named = f"the run to {arguments.verb}; fedmpq runs lists them"
        what = "a run.toml" if arguments.verb == "start" else named
        raise RunsError(f"{arguments.verb} needs {what}")
    if bool(arguments.settings) != (arguments.verb == "set"):
        raise RunsError("fedmpq runs set RUN KEY=VALUE... changes settings; no other verb takes them")
    settings, defaults = _settings(arguments.settings)
    with administration(state) as server:
        if arguments.verb == "set":
            run_id = run_id_of(server, arguments.target)
            request = pb.SetRunRequest(run_id=run_id, settings=settings, defaults=defaults)
            run = server.SetRun(request, timeout=CALL_SECONDS)
        else:
            run = _change(server, arguments.verb, arguments.target)
    if arguments.json:
        print(json.dumps(run_facts(run)))
    else:
        print(run_line(run))
    return 0


def _list(state: StateFolder, as_json: bool) -> int:
    try:
        with administration(state) as server:
            runs = server.ListRuns(pb.ListRunsRequest(), timeout=CALL_SECONDS).runs
    except NotRunning as reason:
        if state.exists:
            _show(_remembered(state), as_json=as_json, running=False)
        print(f"fedmpq runs: {reason}", file=sys.stderr)
        return NOT_RUNNING
    _show(runs, as_json=as_json, running=True)
    return 0


def _show(runs: Sequence[pb.RunStatus], *, as_json: bool, running: bool) -> None:
    if as_json:
        print(json.dumps({"running": running, "runs": [run_facts(run) for run in runs]}))
    elif runs:
        console(sys.stdout).print(runs_table(runs))
    else:
        print("no run yet; fedmpq runs start FILE queues one")


def _remembered(state: StateFolder) -> list[pb.RunStatus]:
    store = open_store(state.database_url())
    try:
        return [stored_run(store, run) for run in store.list_runs()]
    finally:
        store.close()


def _change(server: Administration, verb: str, target: str | None) -> pb.RunStatus:
    if verb == "start":
        path = Path(target or "")
        request = pb.StartRunRequest(config=_named_config(path), folder=str(path.resolve().parent))
        return server.StartRun(request, timeout=START_SECONDS)
    call = {"pause": server.PauseRun, "resume": server.ResumeRun, "abort": server.AbortRun}[verb]
    return call(pb.RunRequest(run_id=run_id_of(server, target)), timeout=CALL_SECONDS)


def _settings(words: Sequence[str]) -> tuple[str, list[str]]:
    """Words as KEY=VALUE: a TOML text, and the names of those that get their defaults."""
    lines, defaults = [], []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.replace("-", "_").isidentifier():
            raise RunsError(f"{word!r} is no setting; write it as deadline_seconds=900")
        if value == DEFAULT:
            defaults.append(name)
        else:
            lines.append(f"{name} = {value if _is_toml(value) else json.dumps(value)}\n")
    return "".join(lines), defaults


def _is_toml(value: str) -> bool:
    """Whether it is a value as TOML writes them; a bare word is not, and is taken as a string."""
    try:
        return len(tomllib.loads(f"value = {value}")) == 1
    except tomllib.TOMLDecodeError:
        return False


def _named_config(path: Path) -> str:
    """The file's text; a run that has no name in it gets the file's, which the server does not learn."""
    text = path.read_text(encoding="utf-8")
    try:
        named = "name" in tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The server says what is wrong, as it does of every other mistake.
        return text
    return text if named else f"name = {json.dumps(path.stem)}\n{text}"


def run_id_of(server: Administration, target: str | None) -> str:
    """Of the run whose id, name or beginning of the id `target` is; None: the run at work."""
    if target is None:
        status = server.GetStatus(pb.GetStatusRequest(), timeout=CALL_SECONDS)
        if not status.HasField("run"):
            raise RunsError("the server has no run yet; fedmpq runs start FILE queues one")
        return status.run.run_id
    runs = server.ListRuns(pb.ListRunsRequest(), timeout=CALL_SECONDS).runs
    exact = [run.run_id for run in runs if target in (run.run_id, run.name)]
    found = exact or [run.run_id for run in runs if target and run.run_id.startswith(target)]
    if len(found) != 1:
        names = ", ".join(f"{run.name} ({run.run_id[:8]})" for run in runs) or "none"
        raise RunsError(f"{target!r} means {'no' if not found else 'more than one'} run; there are: {names}")
    return found[0]
