"""Real boards in a short run: what is measured of them is plausible."""

from __future__ import annotations

import sys

import pytest

from bench import real_boards


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from Linux's /proc")
def test_bytes_and_memory_of_real_boards() -> None:
    found = real_boards.measure(count=1, epochs=1)
    # Side tensors alone are a twentieth of the bits, and planes are never longer than their bits.
    assert 0.5 < found.up.least <= found.up.greatest < 1.1
    assert 0.5 < found.down.least <= found.down.greatest < 1.1
    assert found.packages_mb < found.engine_mb.median < found.client_mb.median
    # A batch's activations in fp32 would take 100 MB by themselves.
    assert found.client_mb.greatest < found.packages_mb + 60
    assert "client process" in real_boards.table(found)
