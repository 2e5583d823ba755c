"""The machine and the software that a measurement was made on."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from fedmpq.system.machine import available_cores, physical_memory


@dataclass(frozen=True)
class Machine:
    cpu_model: str
    cores: int
    """That this process may use."""
    memory_gb: float
    system: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Machine:
        memory = physical_memory()
        versions = {name: version(name) for name in ("fedmpq", "numpy", "torch", "torchvision")}
        return cls(
            cpu_model=_cpu_model(),
            cores=available_cores(),
            memory_gb=round(memory / 1e9, 1),
            system=f"{platform.system()} {platform.machine()}",
            versions={"python": platform.python_version(), **versions},
        )

    def is_busy(self, cores_in_use: float) -> bool:
        """Whether other work keeps more than an eighth of the cores before a measurement."""
        return cores_in_use > self.cores / 8

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def cores_in_use(seconds: float = 1.0) -> float:
    """How many cores all programs of this machine keep busy, over so many seconds from now.

    The load average would tell of programs that have ended a minute ago.
    """
    before = _busy_seconds()
    time.sleep(seconds)
    return round((_busy_seconds() - before) / seconds, 2)


def _busy_seconds() -> float:
    """Of all cores since the start (proc(5)); what guests of this machine use is part of `user`."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def warn_if_busy() -> None:
    """On standard error."""
    machine, used = Machine.here(), cores_in_use()
    if machine.is_busy(used):
        print(
            f"other work keeps {used:g} of {machine.cores} cores busy: it disturbs what is measured here",
            file=sys.stderr,
        )


def _cpu_model() -> str:
    """As Linux names it on x86; ARM kernels give numbers only, so the architecture stands for it there."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
