"""What a board has to hold: the size and number of packages of `pip install fedmpq[edge]`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import wheels

MEGABYTES = 80
PACKAGES = 9


@pytest.mark.parametrize("architecture", wheels.ARCHITECTURES)
def test_the_client_is_small(architecture: str, tmp_path: Path) -> None:
    """As the wheels ship it: byte code, which Python makes anew anywhere, apart."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels.install([f"{wheels.build(architecture)}[edge]"], architecture, python, tmp_path)
    packages = sorted(path.name.partition("-")[0] for path in tmp_path.glob("*.dist-info"))
    assert {"fedmpq", "grpcio", "numpy", "protobuf"} <= set(packages)
    assert len(packages) <= PACKAGES, packages
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= MEGABYTES * 1e6, f"{size / 1e6:.1f} MB: {packages}"
