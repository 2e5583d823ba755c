"""Other simulators, each in an environment of its own, that train what bench/simulation.py gives them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.memory import ROOT
from bench.process_facts import marked_cpu_seconds
from bench.rounds import Moment

PROGRAMS = ROOT / "bench" / "rival_simulations"
ENVIRONMENTS = ROOT / "build" / "rivals"
SECONDS = 1800.0
"""A run that takes longer has failed."""
LAST_CHARACTERS = 2000
LOOK_SECONDS = 0.02
MARK = "FEDMPQ_BENCH_TURN"
"""What a run's processes have in their environment, daemons among them, by which they are counted."""


class RivalError(RuntimeError):
    """A rival that cannot be installed, or that failed."""


@dataclass(frozen=True)
class Rival:
    """A simulator of the Python Package Index."""

    title: str
    requirement: str
    program: str
    launcher: tuple[str, ...] = ()
    """What starts the program, after Python itself."""

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2]

    def installed(self) -> Path:
        """Its Python; makes the environment if there is none."""
        folder = ENVIRONMENTS / self.program
        python, done = folder / "bin" / "python", folder / f"{self.version}-done"
        if not done.exists():
            print(
                f"installing {self.requirement} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True
            )
            shutil.rmtree(folder, ignore_errors=True)
            self._install(Path(sys.executable), "-m", "venv", str(folder))
            # The torch of this project, in the same build.
            torch = f"torch=={version('torch')}"
            self._install(python, "-m", "pip", "install", "--quiet", torch, self.requirement)
            done.touch()
        return python

    def _install(self, python: Path, *words: str) -> None:
        done = subprocess.run([python, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
            raise RivalError(f"{self.requirement} cannot be installed: {last}")

    def moments(self, work: Mapping[str, Any], folder: Path) -> list[Moment]:
        """When each round was over."""
        settings = folder / "work.json"
        settings.write_text(json.dumps({**work, "folder": str(folder)}), encoding="utf-8")
        program = str(PROGRAMS / f"{self.program}.py")
        command = [str(self.installed()), *self.launcher, program, str(settings)]
        mark = f"{MARK}={folder.name}-{uuid4().hex}"
        environment = {**os.environ, **_quiet(folder), MARK: mark.partition("=")[2]}
        said = folder / "said"
        with said.open("wb") as out:
            running = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
            found = _stamped(running, folder / "stamps", mark)
        if running.returncode != 0 or len(found) != work["rounds"]:
            words = said.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:]
            rounds = f"{len(found)} of {work['rounds']} rounds"
            raise RivalError(f"{self.title} ended with {running.returncode} after {rounds}:\n{words}")
        return found


def _stamped(running: subprocess.Popen[bytes], stamps: Path, mark: str) -> list[Moment]:
    """The moments of a program that writes one a line, each with the CPU time up to when it was seen."""
    found: list[Moment] = []
    until = time.monotonic() + SECONDS
    over = False
    while not over:
        over = running.poll() is not None
        lines = stamps.read_text(encoding="ascii").splitlines() if stamps.exists() else []
        if len(lines) > len(found):
            cpu = marked_cpu_seconds(mark)
            found += [Moment(float(line), cpu) for line in lines[len(found) :]]
        if time.monotonic() > until:
            running.kill()
            running.wait()
            raise RivalError(f"a rival's run took longer than {SECONDS:g} s")
        time.sleep(0 if over else LOOK_SECONDS)
    return found


def _quiet(folder: Path) -> dict[str, str]:
    """Nothing is reported to anybody, and nothing listens beyond this machine."""
    return {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def rivals(workers: int) -> dict[str, Rival]:
    """By the name in a result: Flower's simulation on Ray, and pfl-research."""
    spread = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(workers))
    return {
        "flwr": Rival("Flower", "flwr[simulation]==1.41.0", "flower_rounds"),
        "pfl": Rival("pfl-research", "pfl==0.6.0", "pfl_rounds", spread),
    }
