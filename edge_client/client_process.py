"""The process behind `fedmpq client`: it makes a session from the options and ends it cleanly on a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fedmpq import kernels
from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.board_data import NamedData
from fedmpq.edge_client.channel import BUNDLE_FILES, ChannelError, Endpoint, make_endpoint, read_keys
from fedmpq.edge_client.conditions import Conditions, Machine, read_conditions
from fedmpq.edge_client.disk_space import full_words, is_full
from fedmpq.edge_client.fetch_model import fetch_model
from fedmpq.edge_client.follow_model import Following, follow_model
from fedmpq.edge_client.identity import FILE_NAME, checked_name
from fedmpq.edge_client.limits import Limits
from fedmpq.edge_client.refusals import last_words
from fedmpq.edge_client.round_work import READER_NAME, THREAD_NAME
from fedmpq.edge_client.session import Board, Session, Settings
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.edge_client.transfer import Patience
from fedmpq.system.heap import share_one_heap
from fedmpq.system.logs import log_sentences, with_facts
from fedmpq.system.machine import available_cores
from fedmpq.system.memory import give_memory, memory_given, size_text
from fedmpq.training.engine import make_engine

STOP_SECONDS = 1.0
"""How long a stopped client waits for the batch it is training; then the round is lost and trained anew."""
CTRL_C = 130
TOKEN_VARIABLE = "FEDMPQ_TOKEN"
MAX_TOKEN = 4096

log = logging.getLogger("fedmpq.client")


class ClientError(ValueError):
    """Options that do not go together."""


def run(arguments: argparse.Namespace) -> int:
    """What `fedmpq client` does with its options."""
    # SIGTERM ends it cleanly also before the event loop runs, while data are loaded.
    signal.signal(signal.SIGTERM, _exit_cleanly)
    share_one_heap()
    log_sentences(log, arguments.log_format)
    endpoint = _endpoint(arguments)
    settings = _settings(arguments)
    for option in ("follow", "check", "every"):
        if getattr(arguments, option) and (arguments.fetch_model is None or not arguments.follow):
            raise ClientError(f"--{option} goes with --fetch-model FORMAT --follow")
    if arguments.fetch_model is not None:
        return _fetch_model(arguments, endpoint, settings)
    _check_training(arguments)
    name = checked_name(arguments.name or _default_name(arguments.bundle))
    with closing(_opened(arguments.state or default_state(), settings.retry)) as state:
        try:
            board = _board(arguments, name)
        except (ValueError, OSError) as error:
            asyncio.run(last_words(endpoint, state.identity, str(error), settings.retry))
            raise
        session = Session(endpoint, state, board, settings)
        return _leave(asyncio.run(_until_stopped(session)))


def _opened(folder: Path, retry: Backoff) -> StateFolder:
    """The state folder, once the disk has space for it."""
    retry = retry.fresh()
    while True:
        try:
            return StateFolder(folder)
        except OSError as error:
            if not is_full(error):
                raise
        seconds = retry.pause()
        log.warning("%s; trying again in %.1f s", full_words(folder, 0), seconds)
        time.sleep(seconds)


def _check_training(arguments: argparse.Namespace) -> None:
    for option in ("budget", "data"):
        if getattr(arguments, option) is None:
            raise ClientError(f"--{option} is missing; a client that trains needs it")
    if not 1 <= arguments.budget <= 8:
        raise ClientError(f"--budget {arguments.budget:g} is outside 1..8 bits per weight")


def _fetch_model(arguments: argparse.Namespace, endpoint: Endpoint, settings: Settings) -> int:
    """Needs nothing but the identity, so a client that trains may be at work in the same state folder."""
    identity = (arguments.state or default_state()) / FILE_NAME
    if arguments.follow:
        following = Following(arguments.fetch_model, arguments.out, arguments.check, arguments.every)
        asyncio.run(follow_model(endpoint, identity, following, settings.retry, settings.patience))
        return 0
    fetching = fetch_model(
        endpoint, identity, arguments.fetch_model, arguments.out, settings.retry, settings.patience
    )
    print(asyncio.run(fetching))
    return 0


def _board(arguments: argparse.Namespace, name: str) -> Board:
    # Measured once: what this process takes for itself later is part of it.
    give_memory(arguments.max_memory or memory_given())
    engine = make_engine(arguments.engine, arguments.threads)
    threads = arguments.threads or available_cores()
    text = "torch" if arguments.engine == "torch" else f"{arguments.engine} ({kernels.isa()})"
    data = NamedData(arguments.data, arguments.test_data, arguments.skip_class)
    log.info("%s: %d samples", arguments.data, data.samples)
    log.info(
        "engine %s on %d threads, budget %g bits per weight",
        *(text, threads, arguments.budget),
        extra=with_facts({"engine": text, "threads": threads, "budget": arguments.budget}),
    )
    log.info(
        "a round may take %s of memory and %g s",
        *(size_text(memory_given()), arguments.max_seconds),
        extra=with_facts({"max_memory": memory_given(), "max_seconds": arguments.max_seconds}),
    )
    limits = Limits(arguments.max_seconds)
    return Board(name, arguments.budget, data, engine, text, threads, limits, _conditions(arguments))


def _conditions(arguments: argparse.Namespace) -> Conditions:
    if arguments.conditions is None:
        return Conditions()
    machine = Machine(folder=arguments.state or default_state())
    found = read_conditions(arguments.conditions, machine)
    if reason := found.unmet():
        log.info("this board takes part later: not now, %s", reason)
    return found


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    bundle: Path | None = arguments.bundle
    paths = [arguments.ca, arguments.cert, arguments.key]
    if bundle is not None:
        missing = [name for name in BUNDLE_FILES[:3] if not (bundle / name).is_file()]
        if missing:
            raise ChannelError(
                f"{bundle} is no bundle: it has no {missing[0]}; copy the server's whole folder"
            )
        paths = [given or bundle / name for given, name in zip(paths, BUNDLE_FILES, strict=False)]
    endpoint = make_endpoint(arguments.server, read_keys(*paths), insecure=arguments.insecure)
    return replace(
        endpoint, keepalive_seconds=arguments.keepalive, keepalive_timeout=arguments.keepalive_timeout
    )


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        token=_token(arguments),
        retry=Backoff(arguments.retry_least, arguments.retry_most),
        patience=Patience(chunk=arguments.stall, receipt=10 * arguments.stall),
        exit_when_done=arguments.exit_when_done,
    )


def _token(arguments: argparse.Namespace) -> str:
    """Empty if none is given: an enrolled client needs none, and its bundle's may be deleted."""
    if arguments.token is not None and arguments.token_file is not None:
        raise ClientError("--token and --token-file are given; leave one of them out")
    if arguments.token is not None:
        log.warning(
            "--token shows the token to every user of this machine, in its list of processes; give it by "
            "--token-file FILE, --token-file - (standard input) or %s",
            TOKEN_VARIABLE,
        )
        return str(arguments.token).strip()
    if arguments.token_file is not None:
        return _read_token(arguments.token_file)
    if given := os.environ.pop(TOKEN_VARIABLE, ""):
        return given.strip()
    if arguments.bundle is not None and (arguments.bundle / "token").is_file():
        return _read_token(arguments.bundle / "token")
    return ""


def _read_token(file: Path) -> str:
    """The token in a file; `-` is standard input."""
    data = sys.stdin.buffer.read(MAX_TOKEN) if file == Path("-") else file.read_bytes()[:MAX_TOKEN]
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ClientError(f"{file} holds no token: one is a line of letters that begins with fmq_") from None


def _default_name(bundle: Path | None) -> str:
    """A bundle's folder bears the name that its certificate and token were made for."""
    return socket.gethostname() if bundle is None else bundle.resolve().name


def default_state() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedmpq"


# Stopping


async def _until_stopped(session: Session) -> int:
    """0 when the run or SIGTERM ends it, 130 on Ctrl-C; leaves what is not done to the next start."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(name: str, code: int) -> None:
        if not stopped.done():
            log.info("%s: stopping; what is not done goes on at the next start", name)
            stopped.set_result(code)

    loop.add_signal_handler(signal.SIGTERM, stop, "SIGTERM", 0)
    loop.add_signal_handler(signal.SIGINT, stop, "Ctrl-C", CTRL_C)
    task = asyncio.create_task(session.run())
    either: tuple[asyncio.Future[Any], ...] = (task, stopped)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return 0
    task.cancel()
    await asyncio.wait({task}, timeout=STOP_SECONDS)
    return stopped.result()


def _leave(code: int) -> int:
    """Ends at once if a batch is still being trained: the interpreter would wait for its kernels."""
    if any(thread.name in (THREAD_NAME, READER_NAME) for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)
    return code


def _exit_cleanly(_: int, __: FrameType | None) -> NoReturn:
    sys.exit(0)
