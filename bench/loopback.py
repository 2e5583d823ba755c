"""This project's federation on one machine: `fedmpq server` and boards that train nothing, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.memory import ROOT
from bench.rounds import CLIENTS, Rounds, between, bytes_between
from bench.workload import CLASSES, INPUT_SCALE, INPUT_ZERO_POINT
from tools.programs import FEDMPQ, Program, ProgramError, free_port, wait_for_port, wait_until
from tools.tcp_proxy import Proxy

ROUND_SECONDS = 30.0
"""A round that takes longer has failed."""


@dataclass(frozen=True)
class OwnRounds(Rounds):
    payload: list[int]
    """Bytes of planes, steps and side tensors, one way, of each client in each round."""
    server_peak_mb: float


def run(
    model: str,
    image: tuple[int, int, int],
    budget: float,
    rounds: int,
    folder: Path,
    *,
    watched: bool = False,
) -> OwnRounds:
    """`rounds` measured rounds of FedMPQ, all boards with that budget; logs stay in `folder`.

    `watched`: the server shows its dashboard, and somebody looks at it all the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token, config, port = make_token(folder / "server"), folder / "bench.toml", free_port()
    config.write_text(run_settings(model, image, rounds + 1), encoding="utf-8")
    with ExitStack() as stack:
        page = free_port() if watched else None
        server = stack.enter_context(start_server(folder / "server", config, port, page))
        wait_for_port(port, server)
        if page is not None:
            wait_for_port(page, server)
            stack.enter_context(_onlooker(page))
        proxies = [stack.enter_context(Proxy(port)) for _ in range(CLIENTS)]
        boards = [
            stack.enter_context(_board(folder / f"board-{number}", proxy.port, token, budget, image))
            for number, proxy in enumerate(proxies)
        ]
        patience = (rounds + 1) * ROUND_SECONDS
        wait_until(
            lambda: not any(board.running for board in boards), "the boards' rounds", [server], patience
        )
        peak = server.peak_mb()
    notes = [_notes(board, rounds + 1) for board in boards]
    traffic = [bytes_between(proxy, note["moments"]) for proxy, note in zip(proxies, notes, strict=True)]
    return OwnRounds(
        between(notes[0]["moments"]),
        [size for up, _ in traffic for size in up],
        [size for _, down in traffic for size in down],
        [size for note in notes for size in note["payload_bytes"][1:]],
        peak,
    )


def start_server(state: Path, config: Path, port: int, page: int | None = None) -> Program:
    """Without TLS, as Flower's."""
    words = [str(config), "--state", str(state), "--listen", f"127.0.0.1:{port}", "--insecure"]
    words += [] if page is None else ["--dashboard", str(page)]
    return Program([*FEDMPQ, "server", *words], state.with_suffix(".log"))


@contextmanager
def _onlooker(page: int) -> Iterator[None]:
    """Takes every event of the dashboard, as a browser does."""

    def look() -> None:
        # It ends with the server, in the middle of a chunk.
        with (
            suppress(HTTPException, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{page}/api/events") as events,
        ):
            while events.read1():
                pass

    threading.Thread(target=look, daemon=True).start()
    yield


def make_token(state: Path) -> str:
    """Makes the server's folder; good for all boards."""
    for words in (["init"], ["token", "--many"]):
        command = [*FEDMPQ, "server", *words, "--state", str(state), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return str(json.loads(done.stdout)["token"])


def run_settings(model: str, image: tuple[int, int, int], rounds: int, **more: float) -> str:
    """A run.toml for `CLIENTS` boards."""
    settings = {
        "model": model,
        "rounds": rounds,
        "clients_per_round": CLIENTS,
        "image": list(image),
        "classes": CLASSES,
        "input_scale": INPUT_SCALE,
        "input_zero_point": INPUT_ZERO_POINT,
        # Rounds of training alone: that is what is measured, and rivals have no calibration.
        "statistics": "averaged",
        **more,
    }
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _board(folder: Path, port: int, token: str, budget: float, image: tuple[int, int, int]) -> Program:
    """A process that writes `folder`.json in the end."""
    command = [sys.executable, "-m", "bench.noop_board", "--server", f"127.0.0.1:{port}", "--token", token]
    command += ["--name", folder.name, "--budget", str(budget), "--image", *map(str, image)]
    command += ["--classes", str(CLASSES), "--state", str(folder), "--notes", f"{folder}.json"]
    return Program(command, folder.with_suffix(".log"), {"PYTHONPATH": str(ROOT)})


def _notes(board: Program, rounds: int) -> dict[str, list[Any]]:
    """What an ended board wrote; it must have been in every round."""
    path = board.log.with_suffix(".json")
    if not path.exists():
        raise ProgramError(f"a board ended without its notes:\n{board.last_words()}")
    notes: dict[str, list[Any]] = json.loads(path.read_text(encoding="ascii"))
    if (took_part := len(notes["moments"])) != rounds:
        raise ProgramError(f"a board trained {took_part} times in {rounds} rounds:\n{board.last_words()}")
    return notes
