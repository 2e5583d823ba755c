"""Commands as processes: started, watched while something waits for them, and ended; their output is kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

FEDMPQ = (sys.executable, "-m", "fedmpq.cli")
PATIENCE = 120.0
STOP_SECONDS = 20.0
LAST_CHARACTERS = 3000


class ProgramError(RuntimeError):
    """A program that ended or kept silent when it should not have; the message ends with its output."""


class Program:
    """One running command, called by the name of its log; a context manager that ends it.

    Its standard output and error go to the end of the file `log`; `environment` adds to this process's own.
    """

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = log.stem
        self.log = log
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.terminate(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def require_running(self) -> None:
        if not self.running:
            raise ProgramError(f"{self.name} ended with {self.process.returncode}:\n{self.last_words()}")

    def kill(self) -> None:
        """SIGKILL, to the process and whatever it started."""
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self, patience: float = STOP_SECONDS) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(patience)

    def restart(self) -> None:
        assert not self.running
        self.process = self._start()

    def wait(self, patience: float = PATIENCE) -> int:
        """The exit code; a program that does not end in time is killed."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProgramError(f"{self.name} did not end in {patience:g} s:\n{self.last_words()}") from None

    def wait_for(self, words: str, patience: float = PATIENCE) -> None:
        """Until the words are in the output."""
        wait_until(lambda: words in self.text(), repr(words), [self], patience)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        return self.text()[-LAST_CHARACTERS:]

    def peak_mb(self) -> float:
        """The most memory it has had resident since it was last started, in 10^6 bytes."""
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


def wait_for_port(port: int, program: Program, patience: float = PATIENCE) -> None:
    wait_until(lambda: listens(port), f"port {port}", [program], patience)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port nothing listens on now; a restarted server must come back to the same one."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones, held all at once to be so."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
