"""Flower's federation: a SuperLink, SuperNodes and the app of bench/flower_app, in an environment of its own.

Its defaults are kept but for four: no TLS, no telemetry, no question for updates, and no installation of the
app's dependencies (it has none), all of which only make it faster. The SuperLink's state is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench.memory import ROOT
from bench.rounds import CLIENTS, Rounds, between, bytes_between
from tools.programs import Program, ProgramError, free_ports, listens, wait_until
from tools.tcp_proxy import Proxy

VERSION = "1.39.0"
"""The last release whose clients speak gRPC."""
APP = ROOT / "bench" / "flower_app"
ENVIRONMENT = ROOT / "build" / "flower"
ROUND_SECONDS = 60.0
"""A round that takes longer has failed."""
LEAVE_SECONDS = 10.0


class FlowerError(RuntimeError):
    """Flower that cannot be installed."""


def installed() -> Path:
    """The folder of Flower's programs; makes the environment if there is none."""
    done = ENVIRONMENT / f"flwr-{VERSION}"
    if not done.exists():
        print(f"installing flwr {VERSION} into {ENVIRONMENT.relative_to(ROOT)}", file=sys.stderr, flush=True)
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        _install("-m", "venv", str(ENVIRONMENT), python=Path(sys.executable))
        _install("-m", "pip", "install", "--quiet", f"flwr=={VERSION}", python=ENVIRONMENT / "bin" / "python")
        done.touch()
    return ENVIRONMENT / "bin"


def _install(*words: str, python: Path) -> None:
    done = subprocess.run([python, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise FlowerError(f"flwr {VERSION} cannot be installed into {ENVIRONMENT.relative_to(ROOT)}: {last}")


def run(shapes: Sequence[tuple[int, ...]], rounds: int, folder: Path) -> Rounds:
    """`rounds` measured rounds of FedAvg over arrays of those shapes; logs stay in `folder`."""
    bin_folder, home = installed(), folder / "home"
    home.mkdir(parents=True)
    shapes_file, stamps_file = folder / "shapes.json", folder / "stamps"
    shapes_file.write_text(json.dumps(shapes), encoding="ascii")
    with ExitStack() as stack:
        stack.enter_context(_nothing_left(home))
        port, programs, proxies = _started(stack, bin_folder, home, folder)
        files = {"shapes": str(shapes_file), "stamps": str(stamps_file)}
        _submit(bin_folder, home, port, {"rounds": rounds + 1, "clients": CLIENTS, **files})
        patience = (rounds + 1) * ROUND_SECONDS
        wait_until(lambda: len(_moments(stamps_file)) > rounds, "Flower's rounds", programs, patience)
        moments = _moments(stamps_file)
        traffic = [bytes_between(proxy, moments) for proxy in proxies]
    return Rounds(
        between(moments),
        [size for up, _ in traffic for size in up],
        [size for _, down in traffic for size in down],
    )


def _environment(bin_folder: Path, home: Path) -> dict[str, str]:
    return {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def _started(
    stack: ExitStack, bin_folder: Path, home: Path, folder: Path
) -> tuple[int, list[Program], list[Proxy]]:
    """The SuperLink with SuperNodes, each behind a proxy; the port of the former's control API too."""
    environment = _environment(bin_folder, home)
    control, fleet, *node_ports = free_ports(2 + CLIENTS)
    link: list[str | Path] = [bin_folder / "flower-superlink", "--insecure", "--host", "127.0.0.1"]
    link += ["--port", str(control), "--fleet-api-address", f"127.0.0.1:{fleet}"]
    link += ["--disable-runtime-dependency-installation"]
    programs = [stack.enter_context(Program(link, folder / "superlink.log", environment))]
    wait_until(lambda: listens(fleet) and listens(control), "the SuperLink", programs)
    proxies = [stack.enter_context(Proxy(fleet)) for _ in node_ports]
    for number, (port, proxy) in enumerate(zip(node_ports, proxies, strict=True)):
        node: list[str | Path] = [bin_folder / "flower-supernode", "--insecure", "--port", str(port)]
        node += ["--superlink", f"127.0.0.1:{proxy.port}"]
        programs.append(stack.enter_context(Program(node, folder / f"supernode-{number}.log", environment)))
    return control, programs, proxies


def _submit(bin_folder: Path, home: Path, port: int, settings: Mapping[str, int | str]) -> None:
    connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
    (home / "config.toml").write_text(f"{connection}insecure = true\n", encoding="utf-8")
    config = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    done = subprocess.run(
        [bin_folder / "flwr", "run", APP, "here", "--run-config", config],
        env={**os.environ, **_environment(bin_folder, home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise ProgramError(f"flwr run failed:\n{done.stdout[-2000:]}")


def _moments(stamps: Path) -> list[float]:
    """When each round so far was merged; a round that lacks a client's reply is an error."""
    text = stamps.read_text(encoding="ascii") if stamps.exists() else ""
    # The last line may be on its way.
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for number, (_, replies) in enumerate(lines, 1):
        if int(replies) != CLIENTS:
            raise ProgramError(f"round {number} of Flower merged {replies} replies of {CLIENTS} clients")
    return [float(moment) for moment, _ in lines]


@contextmanager
def _nothing_left(home: Path) -> Iterator[None]:
    """Waits in the end for the processes that Flower's processes started, and ends those that stay."""
    try:
        yield
    finally:
        until = time.monotonic() + LEAVE_SECONDS
        while left := _processes_with(home):
            if time.monotonic() > until:
                for process in left:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            time.sleep(0.1)


def _processes_with(home: Path) -> list[int]:
    """Those that have this FLWR_HOME: Flower detaches its children, so no process group holds them all."""
    mark = f"FLWR_HOME={home}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in environment.split(b"\0"):
            found.append(int(folder.name))
    return found
