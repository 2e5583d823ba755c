"""Two real boards that train ResNet-20: the memory of a client's process, and its bytes on the wire.

`fedmpq server` and two `fedmpq client`, processes on this machine without TLS, a TCP proxy before each board.
The boards have 4 bits per weight and half of the embedded digits each, as colour images of 32 x 32. They
train batches of 64 with the settings that a run has by default, but for statistics: those are averaged, since
training is what is measured. Bytes are all that passed in a direction, divided by the rounds; the bits of the
weights are `sum of bits times weights / 8` bytes. The memory is the peak of the client's resident memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.loopback import make_token, run_settings, start_server
from bench.machine import Machine
from bench.memory import ROOT
from bench.rounds import CLIENTS
from bench.timing import Spread, load_average
from fedmpq.data.named import load_named
from fedmpq.exchange.messages import TrainingPlan
from tools import rounds
from tools.programs import FEDMPQ, Program, free_port, wait_for_port, wait_until
from tools.tcp_proxy import Proxy

BUDGET, BATCH, ROUNDS, EPOCHS = 4.0, 64, 6, 5
SIDE, CHANNELS = 32, 3
RESNET20_WEIGHTS = 270_896
PATIENCE = 1800.0


@dataclass(frozen=True)
class Boards:
    down: Spread
    """Bytes that a board was sent in a round, of the bits of its weights; over the boards."""
    up: Spread
    client_mb: Spread
    """10^6 bytes, at the peak."""
    engine_mb: Spread
    """Of a process that imports gRPC and trains one round, and is no client: no connection, no measuring."""
    packages_mb: float
    """NumPy and gRPC imported and nothing done."""
    load_before: list[float]
    load_after: list[float]


def measure(count: int = ROUNDS, epochs: int = EPOCHS) -> Boards:
    before = load_average()
    with TemporaryDirectory() as folder:
        packages, engine = _packages_mb(Path(folder)), _engine_mb(Path(folder))
        peaks, passed = _federation(Path(folder), count, epochs)
    bits = count * BUDGET * RESNET20_WEIGHTS / 8
    return Boards(
        Spread.of([down / bits for _, down in passed]),
        Spread.of([up / bits for up, _ in passed]),
        Spread.of(peaks),
        Spread.of(engine),
        packages,
        before,
        load_average(),
    )


def _federation(folder: Path, count: int, epochs: int) -> tuple[list[float], list[tuple[int, int]]]:
    """Each board's peak, and its bytes up and down."""
    config, port = folder / "bench.toml", free_port()
    image = SIDE, SIDE, CHANNELS
    settings = run_settings("resnet20", image, count, epochs=epochs, batch_size=BATCH)
    config.write_text(settings, encoding="utf-8")
    token = make_token(folder / "server")
    with ExitStack() as stack:
        server = stack.enter_context(start_server(folder / "server", config, port))
        wait_for_port(port, server)
        proxies = [stack.enter_context(Proxy(port)) for _ in range(CLIENTS)]
        boards = [
            stack.enter_context(_board(folder, number, proxy.port, token))
            for number, proxy in enumerate(proxies)
        ]
        # A board that is done stays connected, so that its memory can still be read.
        wait_until(
            lambda: all(f"round {count} " in board.text() for board in boards),
            "the boards' rounds",
            [server, *boards],
            PATIENCE,
        )
        server.wait_for("finished")
        return [board.peak_mb() for board in boards], [(proxy.up, proxy.down) for proxy in proxies]


def _board(folder: Path, number: int, port: int, token: str) -> Program:
    data = folder / f"board-{number}.npz"
    digits, _ = load_named("digits", size=SIDE)
    images = np.repeat(digits.images[number::CLIENTS], CHANNELS, axis=3)
    np.savez(data, x_train=images, y_train=digits.labels[number::CLIENTS])
    words = [
        "--server",
        f"127.0.0.1:{port}",
        "--data",
        str(data),
        "--budget",
        f"{BUDGET:g}",
        "--threads",
        "1",
    ]
    words += ["--name", f"board-{number}", "--state", str(folder / f"state-{number}")]
    environment = {"FEDMPQ_TOKEN": token}
    return Program([*FEDMPQ, "client", *words], folder / f"board-{number}.log", environment)


def _packages_mb(folder: Path) -> float:
    command = [sys.executable, "-c", "import numpy, grpc, time; print('there', flush=True); time.sleep(60)"]
    with Program(command, folder / "packages.log") as program:
        program.wait_for("there")
        return program.peak_mb()


def _engine_mb(folder: Path) -> list[float]:
    source, shape = folder / "round.npz", (CHANNELS, SIDE, SIDE)
    rounds.make(source, "resnet20", shape, 2 * BATCH, TrainingPlan(epochs=1, batch_size=BATCH))
    script = "import grpc, runpy; runpy.run_module('tools.rounds', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", script, str(source), str(folder / "result.npz"), "1"]
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(3)]
    return [float(json.loads(each.stdout)["peak_mb"]) for each in done]


def table(found: Boards) -> str:
    """For a terminal."""
    lines = [
        f"ResNet-20 at {BUDGET:g} bits, {CLIENTS} boards, batch {BATCH}; load average {found.load_before[0]}",
        f"down, of the bits of the weights  {found.down.median:.3f}",
        f"up, of the bits of the weights    {found.up.median:.3f}",
        f"client process, MB                {found.client_mb.median:.1f}",
        f"the engine and gRPC alone, MB     {found.engine_mb.median:.1f}",
        f"NumPy and gRPC at rest, MB        {found.packages_mb:.1f}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real_boards", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of a round (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.epochs)
    if arguments.json:
        print(json.dumps({"bench": "real_boards", **Machine.here().as_dict(), **asdict(result)}))
        return
    print(table(result))


if __name__ == "__main__":
    main()
