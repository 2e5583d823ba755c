"""An ARM board in a folder: an aarch64 Python with the client's packages, run by qemu's user-mode emulation.

    ARM_CPU=cortex-a76 python -m tools.arm_board SCRIPT [ARGUMENT...]

makes the board in build/arm when it is not there yet (about a minute), then runs SCRIPT on it as its Python
would; without SCRIPT it only makes it. cortex-a72 (the default) is a Raspberry Pi 4, cortex-a76 a Pi 5. max
is no CPU in particular but multiplies matrices of bytes (i8mm), as a Cortex-A510 or a Graviton 3 does; it is
told to have no SVE. max-sve128, max-sve256 and max-sve512 are the same with SVE, in registers of so many
bits.
Nothing is installed, and root is not needed: Debian's packages are downloaded by apt from wherever this
machine gets its own, and unpacked; wheels come by pip. Results are those of a real board, bit for bit; times
mean nothing.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.wheels import WheelError, install

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "arm"

# What a board's kernel says of each CPU: features, variant, part, revision.
CPUS = {
    "cortex-a72": ("fp asimd evtstrm crc32 cpuid", "0x0", "0xd08", 3),
    "cortex-a76": (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp",
        "0x4",
        "0xd0b",
        1,
    ),
    "max": (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp i8mm",
        "0x0",
        "0xd46",
        0,
    ),
}
# `max` with SVE: a length that is named is the greatest.
SCALABLE = {f"max-sve{bits}": f"max,sve{bits}=on" for bits in (128, 256, 512)}
# What qemu is told where the name alone is not enough.
QEMU_CPU = {"max": "max,sve=off", **SCALABLE}
DEBIAN_PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
# Folders that live in /usr; older packages still name them without it.
MERGED = ("bin", "lib", "sbin")
# What `fedmpq[edge]` and exported models need, and what the tests do.
WHEELS = (
    *("numpy>=2", "protobuf>=6.31.1,<8", "grpcio>=1.76", "pillow", "onnxruntime>=1.20"),
    *("pytest>=8", "hypothesis"),
)


class BoardError(RuntimeError):
    """A board that could not be made; the message says what failed."""


class NotDebianError(BoardError):
    """This machine has no Debian packages to make a board of."""


@dataclass(frozen=True)
class Board:
    """A board that is there; `launcher(cpu)` is its Python, to be called like any other."""

    folder: Path

    def launcher(self, cpu: str) -> Path:
        if cpu not in (*CPUS, *SCALABLE):
            raise BoardError(f"there is no board with a {cpu!r}; take {' or '.join((*CPUS, *SCALABLE))}")
        return self.folder / cpu / "python"

    def python_version(self) -> str:
        return _python_of(self.folder / "root").name.removeprefix("python")


def main() -> None:
    try:
        board = make()
        launcher = board.launcher(os.environ.get("ARM_CPU", "cortex-a72"))
    except BoardError as error:
        sys.exit(f"arm_board: {error}")
    if len(sys.argv) > 1:
        os.execv(launcher, [str(launcher), *sys.argv[1:]])
    print(launcher)


def make(folder: Path = FOLDER) -> Board:
    """The board in `folder`, made unless this very script has made it already."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        recipe, done = Path(__file__).read_text(encoding="utf-8"), folder / "made_by"
        if not done.exists() or done.read_text(encoding="utf-8") != recipe:
            check_host()
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            done.write_text(recipe, encoding="utf-8")
    return Board(folder)


def check_host() -> None:
    """Raises `NotDebianError` where a board cannot be made."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    if system.get("ID") != "debian":
        # Ubuntu, for one, keeps its arm64 packages on a mirror that its x86_64 machines do not know.
        name = system.get("PRETTY_NAME", platform.system())
        raise NotDebianError(
            f"a board is made of Debian's packages, and this is {name}; take a Debian machine"
        )
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise NotDebianError(f"a board is made of Debian's packages by {' and '.join(missing)}: not found")


def _make(folder: Path) -> None:
    host = _run(["dpkg", "--print-architecture"]).strip()
    apt = _Apt(folder / "apt", host)
    apt.update()
    root = folder / "root"
    apt.unpack("arm64", DEBIAN_PACKAGES, root)
    qemu = shutil.which("qemu-aarch64")
    if qemu is None:
        apt.unpack(host, ("qemu-user",), folder / "qemu")
        qemu = str(folder / "qemu" / "usr" / "bin" / "qemu-aarch64")
        for other in set(Path(qemu).parent.iterdir()) - {Path(qemu)}:
            other.unlink()
    shutil.rmtree(folder / "apt")
    python = _python_of(root)
    version = python.name.removeprefix("python")
    try:
        install(WHEELS, "aarch64", version, folder / "site")
    except WheelError as error:
        raise BoardError(str(error)) from None
    _compile([root / "usr" / "lib" / python.name, folder / "site"], version)
    for cpu in (*CPUS, *SCALABLE):
        _make_cpu(folder, cpu, qemu, python)


class _Apt:
    """Debian's packages for any architecture, by apt, with its lists and downloads in a folder of ours.

    The sources and their keys are the machine's own.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "nothing_installed").touch()

    def update(self) -> None:
        self._apt((self._host, "arm64"), "update")

    def unpack(self, architecture: str, packages: tuple[str, ...], root: Path) -> None:
        """The packages and what they depend on, the host's own less what it has installed."""
        self._apt((architecture,), "install", "--download-only", "--yes", *packages)
        for part in MERGED:
            (root / "usr" / part).mkdir(parents=True)
            (root / part).symlink_to(f"usr/{part}")
        for archive in sorted((self._folder / "cache" / "archives").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(archive), str(root)])
            archive.unlink()

    def _apt(self, architectures: tuple[str, ...], *arguments: str) -> None:
        ours = architectures[0] == self._host
        status = "/var/lib/dpkg/status" if ours else self._folder / "nothing_installed"
        options = [
            f"APT::Architecture={architectures[0]}",
            *(f"APT::Architectures::={name}" for name in architectures),
            "APT::Install-Recommends=false",
            "APT::Sandbox::User=",
            "Acquire::Languages=none",
            "Debug::NoLocking=true",
            f"Dir::State={self._folder / 'state'}",
            f"Dir::State::status={status}",
            f"Dir::Cache={self._folder / 'cache'}",
        ]
        _run(["apt-get", "--quiet=2", *(f"-o={option}" for option in options), *arguments])


def _python_of(root: Path) -> Path:
    """The interpreter itself: usr/bin/python3.N."""
    return next(path for path in (root / "usr" / "bin").glob("python3.*") if path.suffix[1:].isdigit())


def _compile(folders: list[Path], version: str) -> None:
    """Byte-compile here if this is the board's Python version: emulated imports take half the time then."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        # Packages hold files that are meant not to compile.
        command = [sys.executable, "-m", "compileall", "-q", "-j2", *map(str, folders)]
        subprocess.run(command, capture_output=True, check=False)


def _make_cpu(folder: Path, cpu: str, qemu: str, python: Path) -> None:
    """The folder of one CPU: the common root below a /proc/cpuinfo of its own, and the launcher."""
    root = folder / cpu / "root"
    (root / "proc").mkdir(parents=True)
    for part in ("etc", "usr", *MERGED):
        (root / part).symlink_to(folder / "root" / part)
    (root / "proc" / "cpuinfo").write_text(_cpuinfo(cpu), encoding="utf-8")
    libraries = folder / "qemu" / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    launcher = folder / cpu / "python"
    launcher.write_text(
        "#!/bin/sh\n"
        f'export LD_LIBRARY_PATH="{libraries}"\n'
        f'exec "{qemu}" -U LD_LIBRARY_PATH -cpu {QEMU_CPU.get(cpu, cpu)} -L "{root}"'
        f' -E PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{folder / "site"}" "{python}" "$@"\n',
        encoding="utf-8",
    )
    launcher.chmod(0o755)


def _cpuinfo(cpu: str) -> str:
    features, variant, part, revision = CPUS["max" if cpu in SCALABLE else cpu]
    return "".join(
        f"processor\t: {core}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: {revision}\n\n"
        for core in range(4)
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BoardError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
