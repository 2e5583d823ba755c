"""The `fedmpq` command: finds a sub-command's package and hands over.

A sub-command is imported only when it is the one asked for: on a board `fedmpq client` must not pay for the lab.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol


class Command(Protocol):
    """What a sub-command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run_command(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True)
class Entry:
    module: str
    extra: str
    summary: str


COMMANDS = {
    "simulate": Entry("fedmpq.lab.simulate_command", "lab", "train over many simulated clients on this machine"),
    "info": Entry("fedmpq.cli.info", "edge", "version, kernels and engines of this installation"),
}

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; bad input is one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="fedmpq", description="Federated learning with mixed-precision quantization.")
    parser.add_argument("--version", action="version", version=f"fedmpq {version('fedmpq')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in words if not word.startswith("-")), None)
    module: Command | None = None
    for name, entry in COMMANDS.items():
        command = commands.add_parser(name, help=entry.summary)
        if name == wanted:
            module = _load(name, entry)
            if module is None:
                return USAGE_ERROR
            module.add_arguments(command)
    arguments = parser.parse_args(words)
    assert module is not None, "argparse let an unknown command through"
    return _run(module, arguments)


def _load(name: str, entry: Entry) -> Command | None:
    try:
        module: Command = importlib.import_module(entry.module)  # type: ignore[assignment]
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("fedmpq"):
            raise
        print(
            f'fedmpq {name}: {error.name!r} is not installed; install it: pip install "fedmpq[{entry.extra}]"',
            file=sys.stderr,
        )
        return None
    return module


def _run(module: Command, arguments: argparse.Namespace) -> int:
    """Hand over; our own errors are messages for the user, everything else is a bug and keeps its traceback."""
    try:
        return module.run_command(arguments)
    except (ValueError, RuntimeError) as error:
        if not type(error).__module__.startswith("fedmpq."):
            raise
        print(f"fedmpq {arguments.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader of a pipe went away; nothing is left to say, and the interpreter must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
