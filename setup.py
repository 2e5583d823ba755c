"""Build of the two things pyproject.toml cannot say: which folder is which package, and the C++ library.

Each top-level folder `x/` is the package `fedmpq.x`; `front_door/` is `fedmpq` itself. The library is a
plain C ABI loaded with ctypes; it never sees Python's headers, so one wheel per platform serves every Python
(tag py3-none-PLATFORM).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDERS = (
    "proto",
    "kernels",
    "system",
    "model",
    "data",
    "exchange",
    "training",
    "method",
    "edge_client",
    "server",
    "export",
    "lab",
    "dashboard",
    "cli",
)
LIBRARY = "libfedmpq_kernels"


class BuildKernels(build_ext):
    """Runs CMake on kernels/ and leaves the library next to kernels/__init__.py."""

    def get_ext_filename(self, fullname: str) -> str:
        # The default name carries a Python ABI tag, which this library does not depend on.
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "kernels"
        target.parent.mkdir(parents=True, exist_ok=True)
        build.mkdir(parents=True, exist_ok=True)
        # Without build isolation, cmake and ninja sit beside the interpreter, which need not be on PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, "PATH": path}
        configure = [
            "cmake",
            "-G",
            "Ninja",
            "-S",
            str(ROOT / "kernels"),
            "-B",
            str(build),
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        subprocess.run(
            [*configure, f"-DFEDMPQ_OUTPUT_DIRECTORY={target.parent}"], check=True, env=environment
        )
        subprocess.run(["cmake", "--build", str(build)], check=True, env=environment)


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-PLATFORM."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def packages_of(folder: str) -> list[str]:
    return [f"fedmpq.{folder}", *(f"fedmpq.{folder}.{name}" for name in find_packages(str(ROOT / folder)))]


setup(
    packages=["fedmpq", *(package for folder in FOLDERS for package in packages_of(folder))],
    package_dir={"fedmpq": "front_door"} | {f"fedmpq.{folder}": folder for folder in FOLDERS},
    ext_modules=[Extension(f"fedmpq.kernels.{LIBRARY}", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
