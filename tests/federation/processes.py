"""The real programs as processes, `fedmpq server` and `fedmpq client`; their output is kept for failures."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FEDMPQ = [sys.executable, "-m", "fedmpq.cli"]
PATIENCE = 120.0


class Program:
    """One running command; its standard output and error go to a file."""

    def __init__(self, log: Path, *words: str, launcher: list[str] | None = None, **environment: str) -> None:
        self.log = log
        self.words = words
        self._launcher = launcher or FEDMPQ
        self._environment = {**os.environ, **environment}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as file:
            return subprocess.Popen(
                [*self._launcher, *self.words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, to the process and whatever it started."""
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self, patience: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def restart(self) -> None:
        assert not self.running
        self.process = self._start()

    def wait(self, patience: float = PATIENCE) -> int:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.words[0]} did not end in {patience} s:\n{self.text()[-3000:]}"
            ) from None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, words: str, patience: float = PATIENCE) -> None:
        """Until the words are in the output."""
        until = time.monotonic() + patience
        while words not in self.text():
            assert self.running, f"it ended without saying {words!r}:\n{self.text()[-3000:]}"
            assert time.monotonic() < until, f"no {words!r} in {patience} s:\n{self.text()[-3000:]}"
            time.sleep(0.02)


def free_port() -> int:
    """A port nothing listens on now; a restarted server must come back to the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, program: Program, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert program.running, f"it ended before it listened:\n{program.text()[-3000:]}"
            assert time.monotonic() < until, f"nothing listens on {port}:\n{program.text()[-3000:]}"
            time.sleep(0.02)
