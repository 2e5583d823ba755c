import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq import kernels
from fedmpq.kernels import library, prototypes


def test_the_best_isa_is_chosen_and_can_be_forced() -> None:
    before = kernels.isa()
    supported = kernels.supported_isas()
    assert supported[-1] == "scalar"
    for name in supported:
        kernels.force_isa(name)
        assert kernels.isa() == name
    kernels.force_isa(before)


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
