"""Processes of a measurement: started, watched while it waits for something, and ended with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

PATIENCE = 120.0
STOP_SECONDS = 20.0


class ProgramError(RuntimeError):
    """A program that ended or kept silent when it should not have; the message ends with its output."""


class Program:
    """One running command, a context manager; its output goes to the file `log`."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> None:
        self.name = Path(command[0]).name
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def require_running(self) -> None:
        if self.ended:
            raise ProgramError(f"{self.name} ended with {self.process.returncode}:\n{self.last_words()}")

    def last_words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def peak_mb(self) -> float:
        """The most memory it has had resident so far, in 10^6 bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii", errors="replace")
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return round(int(kilobytes) * 1024 / 1e6, 1)


def wait_until(
    done: Callable[[], bool], what: str, programs: Sequence[Program], patience: float = PATIENCE
) -> None:
    """Returns once `done()`; the programs it depends on must stay alive."""
    until = time.monotonic() + patience
    while not done():
        for program in programs:
            program.require_running()
        if time.monotonic() > until:
            told = "\n".join(f"{program.name}:\n{program.last_words()}" for program in programs)
            raise ProgramError(f"waited {patience:g} s in vain for {what}\n{told}")
        time.sleep(0.05)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Different ones, held all at once to be so."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
