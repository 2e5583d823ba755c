"""`make demo`: a server and four boards on this machine, over mutual TLS, train digits together.

Every step is a command a user would type; it is printed before it runs. Everything goes to runs/demo.
"""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedmpq.data.open_source import load
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.administration_client import NotRunning, administration
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.status_text import bytes_text, widths_text
from fedmpq.server.store.sql import open_store
from fedmpq.server.stored_run import read_stored_run
from fedmpq.server.stored_status import stored_status
from tools.browser import BrowserError, NoBrowser, find_browser, photograph
from tools.programs import FEDMPQ, Program, ProgramError, wait_until

FOLDER = Path("runs/demo")
BUDGETS = (2, 4, 6, 8)
ROUNDS = 12
SETTINGS = {"epochs": 4, "batch_size": 16}
PATIENCE = 300.0
IMAGES = 2
console = Console(highlight=False)


class DemoError(RuntimeError):
    """A step that failed; its output is above, or in a file that the message names."""


def main() -> int:
    started = time.monotonic()
    # The programs are in sessions of their own: whatever ends the demo, it is the demo that ends them.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        _prepare()
        status = _federate()
        _print_result(status)
        _export_and_predict()
        _show()
    except (BrowserError, DemoError, NoBrowser, ProgramError) as error:
        console.print(f"demo: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"\n{time.monotonic() - started:.0f} s in all; everything is in {FOLDER}")
    return 0


def _prepare() -> None:
    parts, state = FOLDER / "parts", FOLDER / "state"
    names = [_name(number) for number in range(len(BUDGETS))]
    split = ["--data", "digits", "--clients", str(len(BUDGETS)), "--alpha", "1", "--model", "digits_cnn"]
    _run("split", *split, "--rounds", str(ROUNDS), "-o", str(parts))
    with (parts / "run.toml").open("a", encoding="utf-8") as file:
        file.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
    _run("server", "init", "--state", str(state), quiet=True)
    _run("server", "bundle", *names, "--state", str(state), quiet=True)


def _federate() -> pb.ServerStatus:
    """Server and boards as processes until the run has ended; what the server knows then."""
    state = FOLDER / "state"
    with ExitStack() as stack:
        server = stack.enter_context(_started("server", *_server_words()))
        address = _wait_for_address(server, state)
        console.print(f"in the browser: {_dashboard_url(server)}", soft_wrap=True)
        numbers = range(len(BUDGETS))
        boards = [stack.enter_context(_started(_name(n), *_board_words(n, address))) for n in numbers]
        _follow(state)
        for program in (server, *boards):
            if program.wait(PATIENCE) != 0:
                raise DemoError(f"{program.name} failed; see {program.log}")
    store = open_store(StateFolder(state).database_url())
    try:
        return stored_status(store)
    finally:
        store.close()


def _server_words() -> list[str]:
    run, state = str(FOLDER / "parts" / "run.toml"), str(FOLDER / "state")
    return [
        "server",
        run,
        "--state",
        state,
        "--listen",
        "127.0.0.1:0",
        "--dashboard",
        "0",
        "--exit-when-done",
    ]


def _name(number: int) -> str:
    return f"board-{number}"


def _run(*words: str, quiet: bool = False) -> None:
    _print_command(words)
    done = subprocess.run([*FEDMPQ, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(done.stderr.strip())
    if not quiet:
        console.print(done.stdout.rstrip(), soft_wrap=True)


def _print_command(words: Sequence[str]) -> None:
    console.print(f"$ fedmpq {' '.join(words)}", style="bold", soft_wrap=True)


def _started(name: str, *words: str) -> Program:
    """The command at work; its output goes to NAME.log."""
    _print_command(words)
    return Program([*FEDMPQ, *words], FOLDER / f"{name}.log")


def _board_words(number: int, address: str) -> list[str]:
    return [
        "client",
        *("--server", address, "--budget", str(BUDGETS[number])),
        *("--data", str(FOLDER / "parts" / f"client-{number}.npz")),
        *("--bundle", str(FOLDER / "state" / "bundles" / _name(number))),
        *("--state", str(FOLDER / _name(number)), "--threads", "1", "--exit-when-done"),
    ]


def _wait_for_address(server: Program, state: Path) -> str:
    """Where the server listens; tracing the model takes it a few seconds first."""
    file = state / "listening"
    wait_until(file.is_file, "the server's address", [server], PATIENCE)
    return file.read_text(encoding="utf-8").strip()


def _dashboard_url(server: Program) -> str:
    """Where the server's dashboard is, which it has said before it listened for boards."""
    words = server.log.read_text(encoding="utf-8").split()
    return next(word for word in words if word.startswith("http://")).rstrip(";")


def _show() -> None:
    """A picture of the run: of its dashboard where there is a browser, or else of its history."""
    state, picture = FOLDER / "state", FOLDER / "dashboard.png"
    if find_browser() is None:
        picture = FOLDER / "history.png"
        _run("history", str(state), "--format", "png", "-o", str(picture))
    else:
        words = ["dashboard", str(state), "--listen", "127.0.0.1:0"]
        with _started("dashboard", *words) as dashboard:
            wait_until(lambda: "http://" in dashboard.log.read_text(), "the dashboard", [dashboard], PATIENCE)
            photograph(_dashboard_url(dashboard), picture)
    console.print(
        f"a picture of the run is in {picture}; in the browser: fedmpq dashboard {state}", soft_wrap=True
    )


def _follow(state: Path) -> None:
    """A bar and a line for each round, as the server tells them, until it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        told = 0
        task = progress.add_task("waiting for the boards", total=ROUNDS)
        try:
            with administration(StateFolder(state)) as operator:
                for status in operator.WatchStatus(pb.GetStatusRequest()):
                    progress.update(task, completed=status.run.round, description=_doing(status.run))
                    # For those who read a log and see no bar; a round is measured once it is calibrated.
                    measured = status.run.metrics.HasField("mean_deployed_accuracy")
                    if status.run.round > told and measured and not console.is_terminal:
                        told = status.run.round
                        console.print(f"round {told} of {ROUNDS}: {_accuracy(status.run)}")
        except NotRunning:
            pass
        progress.update(task, completed=ROUNDS, description="done")


def _doing(run: pb.RunStatus) -> str:
    accuracy = f", {_accuracy(run)}" if run.metrics.HasField("mean_deployed_accuracy") else ""
    calibrates = run.phase == "calibration"
    number = run.round if calibrates else min(run.round + 1, run.rounds)
    answers = "statistics" if calibrates else "updates"
    return f"round {number}: {run.updates} of {len(BUDGETS)} {answers}{accuracy}"


def _accuracy(run: pb.RunStatus) -> str:
    return f"{run.metrics.mean_deployed_accuracy:.1%} right on average"


def _print_result(status: pb.ServerStatus) -> None:
    """Each board's deployed model, and what it sent against the same rounds in FP32."""
    table = Table(title="What each board runs, on test images none of them has seen")
    for column in ("board", "bit-widths"):
        table.add_column(column)
    for column in ("bits a weight", "accuracy", "sent", "in FP32"):
        table.add_column(column, justify="right")
    full = _full_precision_bytes() * ROUNDS
    for client in status.clients:
        table.add_row(
            client.name,
            widths_text(client.bit_widths),
            f"{client.budget:g}",
            f"{client.accuracy:.1%}",
            bytes_text(client.bytes_up),
            f"{bytes_text(full)} ({full / client.bytes_up:.1f}x)",
        )
    console.print(table)


def _export_and_predict() -> None:
    """Every board's model as verified files, and one of them at work on images of the test set."""
    models = FOLDER / "models"
    words = ["--all", "--format", "onnx,executorch", "--no-speed", "-o", str(models)]
    _run("export", "--run", str(FOLDER / "state"), *words)
    images = _write_images(FOLDER / "images")
    _run("predict", str(models / f"{_name(1)}.onnx"), *map(str, images))


def _write_images(folder: Path) -> list[Path]:
    folder.mkdir()
    test = load(FOLDER / "parts" / "test.npz", "test")
    paths: list[Path] = []
    for pixels, label in zip(test.images[:IMAGES], test.labels, strict=False):
        paths.append(folder / f"a-{test.class_names[label]}-{len(paths)}.png")
        Image.fromarray(pixels[:, :, 0]).save(paths[-1])
    return paths


def _full_precision_bytes() -> int:
    """Four bytes for every weight and side value."""
    graph = read_stored_run(StateFolder(FOLDER / "state")).graph
    side = sum(math.prod(shape) for shape in graph.side_shapes().values())
    return 4 * (sum(graph.layer_sizes) + side)


if __name__ == "__main__":
    sys.exit(main())
