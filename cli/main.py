"""The `fedmpq` command: finds a sub-command's package and hands over.

A sub-command is imported only when it is the one asked for: on a board `fedmpq client` must not pay for the
lab.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NoReturn, Protocol

from fedmpq.system.named_object import suggestion


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
    "simulate": Entry(
        "fedmpq.cli.simulate_command", "lab", "train over many simulated clients on this machine"
    ),
    "reproduce": Entry(
        "fedmpq.cli.reproduce_command", "lab", "run the paper's tables, at a scale of your choice"
    ),
    "split": Entry("fedmpq.cli.split_command", "lab", "divide a data set into files for several clients"),
    "server": Entry("fedmpq.cli.server_command", "server", "serve runs to clients; keys, tokens, bundles"),
    "status": Entry("fedmpq.cli.status_command", "server", "round, clients, bytes and accuracy of a server"),
    "history": Entry(
        "fedmpq.cli.history_command", "server", "what a run did, round by round: table, CSV, JSON, picture"
    ),
    "dashboard": Entry(
        "fedmpq.cli.dashboard_command", "dashboard,server", "runs in the browser, live while they go on"
    ),
    "track": Entry("fedmpq.cli.track_command", "server,tracking", "a run's rounds for TensorBoard or MLflow"),
    "runs": Entry("fedmpq.cli.runs_command", "server", "list, start, pause, resume, abort and change runs"),
    "rollout": Entry(
        "fedmpq.cli.rollout_command", "server", "give boards a new model in stages; who runs what"
    ),
    "client": Entry("fedmpq.cli.client_command", "edge", "take part in a federation with this device"),
    "export": Entry(
        "fedmpq.cli.export_command", "export,lab,server", "models for ONNX Runtime and ExecuTorch"
    ),
    "quantize": Entry(
        "fedmpq.cli.quantize_command", "export,lab", "a network trained elsewhere, in mixed precision"
    ),
    "predict": Entry("fedmpq.cli.predict_command", "predict", "what an exported model sees in images"),
    "bench": Entry("fedmpq.cli.bench_command", "predict", "latency and memory of exported models"),
    "doctor": Entry(
        "fedmpq.cli.doctor_command", "edge", "look for faults of a board or a server, and say the fix"
    ),
    "completion": Entry(
        "fedmpq.cli.completion_command", "completion", "what a shell needs to complete these commands"
    ),
    "info": Entry("fedmpq.cli.info", "edge", "version, kernels and engines of this installation"),
}

USAGE_ERROR = 2
FULL_DISK = 75
"""EX_TEMPFAIL of sysexits.h: the same command may go well later, so a service manager may try again."""
ON_CTRL_C = 130


class Parser(argparse.ArgumentParser):
    """Errors in one line; argparse itself would print all options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; bad input is one line on standard error and exit code 2, a full disk 75."""
    # gRPC reads it when it is first imported; its own lines would stand between those of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    words = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in words if not word.startswith("-")), None)
    try:
        return _dispatch(words, wanted)
    except KeyboardInterrupt:
        return ON_CTRL_C
    except BrokenPipeError:
        # The reader of a pipe went away; nothing is left to say, and the interpreter must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if (message := _message(error, wanted)) is None:
            raise
        name = f"fedmpq {wanted}" if wanted else "fedmpq"
        print(f"{name}: {' '.join(message.splitlines())}", file=sys.stderr)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return FULL_DISK if full else USAGE_ERROR


def _dispatch(words: Sequence[str], wanted: str | None) -> int:
    parser = Parser(prog="fedmpq", description="Federated learning with mixed-precision quantization.")
    parser.add_argument(
        "--version", action="version", version=f"fedmpq {version('fedmpq')}", help="print the version"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    parsers = {name: commands.add_parser(name, help=entry.summary) for name, entry in COMMANDS.items()}
    if wanted is None:
        parser.parse_args(words)
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    if wanted not in COMMANDS:
        known = ", ".join(COMMANDS)
        parser.error(f"there is no command {wanted!r}{suggestion(wanted, COMMANDS)}; there are {known}")
    module: Command = importlib.import_module(COMMANDS[wanted].module)
    module.add_arguments(parsers[wanted])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        options = parsers[wanted].format_help().split()
        parsers[wanted].error(f"unknown argument {unknown[0]!r}{suggestion(unknown[0], options)}")
    code = module.run_command(arguments)
    # Here, where a broken pipe is expected, and not when the interpreter ends.
    sys.stdout.flush()
    return code


def _message(error: Exception, wanted: str | None) -> str | None:
    """What to tell the user; None for what is a bug and keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        if wanted not in COMMANDS or error.name is None or error.name.startswith("fedmpq"):
            return None
        return f'{error.name!r} is not installed; install it: pip install "fedmpq[{COMMANDS[wanted].extra}]"'
    if isinstance(error, OSError):
        return str(error)
    return str(error) if type(error).__module__.startswith("fedmpq.") else None
