import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq import kernels
from fedmpq.kernels import library, prototypes


def test_the_best_isa_is_chosen_and_can_be_forced() -> None:
    script = "from fedmpq import kernels; print(kernels.isa())"
    environment = {name: value for name, value in os.environ.items() if name != "FEDMPQ_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    before = kernels.isa()
    supported = kernels.supported_isas()
    assert supported[-1] == "scalar"
    # With registers of 128 bits SVE is no better than NEON, which tests/arm/test_board.py shows.
    assert done.stdout.strip() in supported[: 1 + (supported[0] == "sve")]
    for name in supported:
        kernels.force_isa(name)
        assert kernels.isa() == name
    kernels.force_isa(before)


VNNI = {"avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
NEEDS = {
    "avx512": VNNI | {"avx512_vpopcntdq", "avx512vbmi", "gfni"},
    "avx512_vnni": VNNI,
    "avx2": {"avx2", "popcnt"},
}
"""What Linux calls the extensions that an instruction set uses."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the extensions of x86")
@pytest.mark.parametrize("name", NEEDS)
def test_an_x86_cpu_with_the_extensions_has_the_instruction_set(name: str) -> None:
    """Of AVX-512, Cascade Lake has products of bytes and none of the operations on bits."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = set(next(line for line in facts if line.startswith("flags")).split())
    assert (name in kernels.supported_isas()) == (NEEDS[name] <= flags)


@pytest.mark.parametrize("name", ["", "sse9", "AVX2"])
def test_an_unknown_isa_is_refused_and_changes_nothing(name: str) -> None:
    before = kernels.isa()
    with pytest.raises(ValueError, match="is not available here; choose one of"):
        kernels.force_isa(name)
    assert kernels.isa() == before


def test_the_environment_variable_forces_an_isa() -> None:
    command = [sys.executable, "-c", "from fedmpq import kernels; print(kernels.isa())"]
    environment = {**os.environ, "FEDMPQ_ISA": "scalar"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "scalar"


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"cannot load absent\.so.*pip install -e \."):
        library.load(tmp_path / "absent.so")


def test_a_stale_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prototypes.PROTOTYPES, "fedmpq_of_tomorrow", prototypes.Prototype(None, ()))
    with pytest.raises(
        ImportError, match=r"lacks fedmpq_of_tomorrow.*older than its sources.*pip install -e \."
    ):
        library.load(library.PATH)
