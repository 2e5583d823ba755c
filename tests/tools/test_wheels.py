"""The wheels: tags that hold, a library that any Linux can load, and training that ends as it does here."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from fedmpq import kernels
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels.prototypes import PROTOTYPES
from tests.test_imports import MAY_IMPORT
from tools import rounds, wheels

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "fedmpq/kernels/libfedmpq_kernels.so"
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
PAGE = 16384
"""Bytes: the greatest page that a board's kernel uses, on a Raspberry Pi 5."""
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module", params=wheels.ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def wheel(architecture: str) -> Path:
    return wheels.build(architecture)


@pytest.fixture(scope="module")
def library(wheel: Path) -> ELFFile:
    with zipfile.ZipFile(wheel) as archive:
        return ELFFile(io.BytesIO(archive.read(LIBRARY)))


def section(library: ELFFile, name: str) -> Any:
    found = library.get_section_by_name(name)
    assert found is not None
    return found


def test_the_tag_serves_every_python_and_old_c_libraries(wheel: Path, architecture: str) -> None:
    name, _, _, tags = parse_wheel_filename(wheel.name)
    assert name == "fedmpq"
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}
    assert f"manylinux_2_17_{architecture}" in {tag.platform for tag in tags}


def test_the_library_is_for_the_architecture(library: ELFFile, architecture: str) -> None:
    assert library["e_machine"] == MACHINES[architecture]


def test_segments_are_aligned_for_large_pages(library: ELFFile) -> None:
    alignments = [segment["p_align"] for segment in library.iter_segments("PT_LOAD")]
    assert len(alignments) >= 2
    assert min(alignments) >= PAGE


def test_nothing_but_the_c_library_is_needed(library: ELFFile) -> None:
    """Neither a C++ library nor the compiler's, and no symbol of Python's."""
    needed = {tag.needed for tag in section(library, ".dynamic").iter_tags("DT_NEEDED")}
    assert needed <= SYSTEM
    undefined = [
        symbol.name
        for symbol in section(library, ".dynsym").iter_symbols()
        if symbol.name and symbol["st_shndx"] == "SHN_UNDEF"
    ]
    assert "malloc" in undefined
    assert not [
        name for name in undefined if name.startswith(("Py", "_Py", "_Z", "_Unwind", "__gcc", "__cxa"))
    ]


def test_symbols_are_no_newer_than_the_tag_says(library: ELFFile) -> None:
    versions = [
        version.name
        for _, versions in section(library, ".gnu.version_r").iter_versions()
        for version in versions
    ]
    assert all(re.fullmatch(r"GLIBC_[\d.]+", version) for version in versions)
    assert max(Version(version.removeprefix("GLIBC_")) for version in versions) <= Version("2.17")


def test_only_the_c_interface_shows(library: ELFFile) -> None:
    defined = {
        symbol.name
        for symbol in section(library, ".dynsym").iter_symbols()
        if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"
    }
    assert defined == set(PROTOTYPES)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {
            name for name in archive.namelist() if name.endswith((".py", ".so")) and "dist-info" not in name
        }
    modules = {
        f"fedmpq/{path.relative_to(ROOT).as_posix()}"
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*.py")
    }
    assert held == modules | {LIBRARY, "fedmpq/__init__.py"}


def run_with(site: Path, script: str, *arguments: str, isa: str | None = None) -> list[str]:
    """What Python prints with the packages of `site` before those of this environment."""
    chosen = {} if isa is None else {"FEDMPQ_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site), **chosen},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_wheel_for_this_machine_trains_as_the_build_here_does(tmp_path: Path) -> None:
    """Compiled by another compiler, it ends a round with the same bits on every instruction set."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine, site = platform.machine(), tmp_path / "site"
    wheels.install([str(wheels.build(machine)), "--no-deps"], machine, python, site)
    held = run_with(site, "import fedmpq.kernels; print(*fedmpq.kernels.supported_isas(), sep='\\n')")
    # AVX-VNNI in the encoding of AVX-512 is for tests alone: boards go without it (kernels/CMakeLists.txt).
    assert set(kernels.supported_isas()) - {"avx_vnni"} <= set(held) <= set(kernels.supported_isas())
    source, result = tmp_path / "round.npz", tmp_path / "result.npz"
    rounds.make(source, "digits_cnn", (1, 8, 8), 50, TrainingPlan(epochs=1, batch_size=25))
    expected = rounds.train(source, 1)
    script = (
        "import runpy, fedmpq.kernels\n"
        "print(fedmpq.kernels.__file__)\n"
        "runpy.run_module('tools.rounds', run_name='__main__', alter_sys=True)"
    )
    for isa in held:
        path, report = run_with(site, script, str(source), str(result), "2", isa=isa)
        assert Path(path).is_relative_to(site)
        assert json.loads(report)["isa"] == isa
        with np.load(result) as ended:
            assert {name: ended[name].tobytes() for name in ended} == {
                name: array.tobytes() for name, array in expected.items()
            }


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(wheels.WheelError, match="no wheels for 'sparc', only for x86_64, aarch64"):
        wheels.build("sparc")


def test_a_missing_cross_compiler_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(wheels.WheelError, match=r'pip install "fedmpq\[wheels\]"'):
        wheels._toolchain("aarch64")
