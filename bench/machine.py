"""The machine and the software that a measurement was made on."""

from __future__ import annotations

import platform
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

    def busy_with(self, load: list[float]) -> bool:
        """Whether other work kept more than a quarter of the cores before a measurement."""
        return load[0] > self.cores / 4

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _cpu_model() -> str:
    """As Linux names it on x86; ARM kernels give numbers only, so the architecture stands for it there."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
