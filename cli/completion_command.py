"""`fedmpq completion`: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpq.cli.main import COMMANDS, Parser
from fedmpq.cli.server_command import SECURITY_ACTIONS

SHELLS = ("bash", "zsh", "tcsh")
_RUNS = "_fedmpq_runs"
# A server is given files of runs, or one of a few verbs.
_PREAMBLE: Mapping[str, str] = {
    "bash": f"""{_RUNS}() {{
  compgen -W "{" ".join(SECURITY_ACTIONS)}" -- "$1"
  compgen -f -- "$1"
}}""",
    "zsh": f"""{_RUNS}() {{
  _alternative 'verbs:verb:({" ".join(SECURITY_ACTIONS)})' 'files:run:_files'
}}""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script that makes a shell complete commands, options and files."
    parser.epilog = (
        "bash: fedmpq completion bash > ~/.local/share/bash-completion/completions/fedmpq; "
        "zsh: fedmpq completion zsh > a folder of $fpath, as _fedmpq"
    )
    parser.add_argument("shell", choices=SHELLS)


def run_command(arguments: argparse.Namespace) -> int:
    import shtab

    parser, left_out = whole_parser()
    for action in _actions(parser):
        if action.type is Path and not hasattr(action, "complete"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    preamble: Any = dict(_PREAMBLE)
    print(shtab.complete(parser, arguments.shell, preamble=preamble))
    for name, missing in left_out.items():
        print(f'# options of "{name}" are not completed: {missing} is not installed here')
    return 0


def whole_parser() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """All commands with their options, and those whose packages are not all installed, which have none."""
    parser, left_out = Parser(prog="fedmpq"), {}
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, entry in COMMANDS.items():
        own = commands.add_parser(name, help=entry.summary)
        try:
            importlib.import_module(entry.module).add_arguments(own)
        except ModuleNotFoundError as error:
            left_out[name] = str(error.name)
            continue
        for action in own._actions:
            if name == "server" and action.dest == "runs":
                action.complete = {"bash": _RUNS, "zsh": _RUNS}  # type: ignore[attr-defined]
    return parser, left_out


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for each in action.choices.values() for inner in _actions(each)]
    return found
