"""Connections that never last: what has arrived stays, so every board comes to its end all the same."""

from __future__ import annotations

from pathlib import Path

from tests.federation.federation import Federation, assert_same
from tools.tcp_proxy import Proxy

CUT_EVERY = 30_000
"""Bytes of all boards together, of which three handshakes of mutual TLS are more than half."""


def test_three_boards_are_cut_all_the_time(tmp_path: Path) -> None:
    """A chunk of the usual length does not fit between two cuts any more."""
    with Federation(tmp_path, (2, 4, 8), {"rounds": 1}) as federation:
        federation.start_server()
        with Proxy(federation.port, cut_every=CUT_EVERY) as proxy:
            federation.start_boards(proxy.port)
            assert_same(federation.finish(), federation.simulated())
            assert proxy.cuts >= 5
