"""`fedmpq client`: this board takes part in a federation as a client."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fedmpq.model.export_formats import FORMATS
from fedmpq.system.memory import parse_size
from fedmpq.system.named_object import is_path, unknown_name
from fedmpq.training.engine import DEFAULT_ENGINE, engine_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take part in a federation: enrol once, wait for rounds, train on local data, send updates.\n"
        "Keeps on through server restarts and network cuts until it is stopped."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq client --server 192.168.1.10:8470 --budget 4 --data ~/photos --bundle ~/board-1\n"
        "  fedmpq client --server localhost:8470 --budget 2 --data client-0.npz --token-file token\n"
        "  fedmpq client --server 192.168.1.10:8470 --bundle ~/board-1 --fetch-model onnx -o models\n"
        "  fedmpq client --server 192.168.1.10:8470 --bundle ~/board-1 --fetch-model onnx --follow -o models"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_required(parser)
    _add_security(parser)
    _add_behaviour(parser)
    _add_models(parser)


def _add_required(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="where the server listens")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="BITS",
        help="bits per weight that this board can hold, 1..8",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="labelled data: class folders of photos or WAV files, .npz, tables, idx files, or your own as "
        "package.module:name; docs/data.md says more",
    )
    parser.add_argument(
        "--test-data", metavar="PATH", help="measure received models on these (default: on --data)"
    )
    parser.add_argument(
        "--skip-class",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out the samples of this class, such as one that the model does not have; may be repeated",
    )


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security")
    group.add_argument(
        "--bundle", type=Path, metavar="DIR", help="ca.pem, client.pem, client.key and token in one folder"
    )
    group.add_argument(
        "--ca", type=Path, metavar="PEM", help="the authority that signed the server's certificate"
    )
    group.add_argument("--cert", type=Path, metavar="PEM", help="this client's certificate, for mutual TLS")
    group.add_argument("--key", type=Path, metavar="PEM", help="the key of --cert")
    group.add_argument(
        "--token",
        metavar="T",
        help="enrolment token; needed once. Other users of this machine see it: prefer --token-file, "
        "or the environment variable FEDMPQ_TOKEN",
    )
    group.add_argument(
        "--token-file", type=Path, metavar="FILE", help="read the token from a file; - is standard input"
    )
    group.add_argument("--insecure", action="store_true", help="talk to another machine without TLS")


def _add_behaviour(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("behaviour")
    group.add_argument("--name", help="this client's name (default: the bundle's, or the host's)")
    group.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="identity and unfinished work (default: ~/.local/state/fedmpq)",
    )
    group.add_argument(
        "--engine", choices=engine_names(), default=DEFAULT_ENGINE, help="default: %(default)s"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads that train (default: all cores)")
    group.add_argument(
        "--max-memory",
        type=_memory,
        metavar="SIZE",
        help="memory that this client may take, such as 800M or 50%% (default: 80%% of what is free at its "
        "start); a round that needs more is refused",
    )
    group.add_argument(
        "--max-seconds",
        type=_seconds,
        default=86400.0,
        metavar="S",
        help="seconds that training a round may take (default: a day); one that takes longer is refused",
    )
    group.add_argument(
        "--conditions",
        type=Path,
        metavar="FILE",
        help="when this board may work: hours, mains_power, max_temperature, max_load, min_free_memory, "
        "min_free_disk, unmetered, in a section [conditions]; docs/client.md says more",
    )
    group.add_argument("--exit-when-done", action="store_true", help="end with the run")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    for name, default, what in (
        ("retry-least", 1.0, "first pause before connecting again, in seconds"),
        ("retry-most", 60.0, "longest pause"),
        ("stall", 30.0, "a transfer that does not move for so many seconds begins again"),
        ("keepalive", 60.0, "seconds of silence after which the connection is checked"),
        ("keepalive-timeout", 20.0, "seconds until an unanswered check means that it is dead"),
    ):
        group.add_argument(
            f"--{name}", type=_seconds, default=default, metavar="S", help=f"{what} (default: {default:g})"
        )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--fetch-model",
        type=_format,
        metavar="FORMAT",
        help=f"do not train: get this client's own model as a file, {', '.join(FORMATS)}, and end",
    )
    group.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where --fetch-model puts it (default: here)",
    )
    group.add_argument(
        "--follow",
        action="store_true",
        help="with --fetch-model: keep on, switch to each new version once it has passed a check here, and "
        "report how it does",
    )
    group.add_argument(
        "--every",
        type=_seconds,
        metavar="S",
        help="with --follow: seconds between two questions (default: as the server says)",
    )
    group.add_argument(
        "--check",
        metavar="COMMAND",
        help="with --follow: run with a model's path, exit code 0 means good (default: its hash, and that "
        "ONNX Runtime computes with it where that is installed)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    # gRPC reads it while it is loaded. What its library prints beside the log is told there anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from fedmpq.edge_client.client_process import run

    return run(arguments)


def _format(text: str) -> str:
    """A built-in format, or one of the run's own, which only the server can check."""
    if text not in FORMATS and not is_path(text):
        raise argparse.ArgumentTypeError(unknown_name("format", text, FORMATS))
    return text


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0, at most a day")
    return seconds
