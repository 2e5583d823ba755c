"""Asynchronous merges of real processes: what a server made, killed or not, follows from its record.

The record is what the store keeps: which board's change, of which version of the model, is in which merge.
Those changes, merged offline by the method that simulations run, give the same `W` to the bit.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from fedmpq.method.archive import Tensors
from fedmpq.server.state_folder import StateFolder
from tests.federation.federation import Arrays, Federation, assert_same
from tests.history.facts import read_told, stored_in
from tests.history.replay import Replay
from tools.programs import wait_for_port
from tools.tcp_proxy import Proxy

SETTINGS = {"asynchronous": 2, "clients_per_round": 3, "rounds": 16, "deadline_seconds": 0}
BUDGETS = (2, 4, 8)
KILLS = 3


def replayed(federation: Federation) -> Arrays:
    """The last model, made again from the record and the changes as the boards have sent them."""
    assert federation._first is not None
    stored = stored_in(StateFolder(federation.state))
    told = read_told(federation.folder / "histories")
    *_, last = Replay(federation._first, stored, told.payloads).steps()
    return Tensors.of(last.model).to_arrays()


def staleness(federation: Federation) -> list[int]:
    """Of all that was merged."""
    rounds = federation.history().rounds
    return [one.staleness for facts in rounds for one in facts.clients if one.outcome == "trained"]


def test_the_record_gives_the_model_also_where_the_server_is_killed(tmp_path: Path) -> None:
    """After a random part of a second each time, in merges and between them; one board's line is slow."""
    moments = random.Random(11)
    with Federation(tmp_path, BUDGETS, SETTINGS) as federation:
        server = federation.start_server()
        with Proxy(federation.port, rate=30_000) as slow:
            federation.start_board(0)
            federation.start_board(1)
            federation.start_board(2, slow.port)
            for kill in range(1, KILLS + 1):
                until = time.monotonic() + moments.uniform(0.2, 1.2)
                merged = f"round merged run=parts round={2 * kill} "
                while time.monotonic() < until and merged not in server.text():
                    time.sleep(0.005)
                assert server.running, f"the run ended before kill {kill}: {server.last_words()}"
                server.kill()
                server.restart()
                wait_for_port(federation.port, server)
            slow.rate = None
            assert_same(federation.finish(), replayed(federation))
        assert server.text().count("listening on") == KILLS + 1
        assert max(staleness(federation)) > 0, "the slow board was sent earlier versions"
        assert len(federation.history().rounds) == SETTINGS["rounds"]
