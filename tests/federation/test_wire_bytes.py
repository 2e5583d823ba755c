"""What crosses the network, counted by a proxy: hardly more than the planes and side tensors."""

from __future__ import annotations

from pathlib import Path

from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.records import Member
from fedmpq.server.store.sql import open_store
from tests.federation.federation import Federation
from tools.tcp_proxy import Proxy

ROUNDS = 8


def test_a_round_costs_its_planes_and_side_tensors(tmp_path: Path) -> None:
    """Handshake, enrolment, the graph and all headers included: at most 1.03 times both ways."""
    settings = {"model": "resnet20", "rounds": ROUNDS, "batch_size": 8}
    split = ("--size", "32", "--train-limit", "40", "--test-limit", "20")
    with Federation(tmp_path, (4.0,), settings, split=split) as federation:
        federation.start_server()
        with Proxy(federation.port) as proxy:
            federation.start_board(0, proxy.port)
            federation.finish()
            crossed = proxy.total
        member = only_member(federation)
        graph = federation.stored().graph
    # At least 90 % of the 4 bits a weight were spent, so the ratio below is not against thin air.
    assert min(member.bytes_up, member.bytes_down) > 0.9 * ROUNDS * sum(graph.layer_sizes) / 2
    # A payload has half a percent more than its planes and side tensors; 1.03 against those is this:
    assert crossed <= 1.025 * (member.bytes_up + member.bytes_down)


def only_member(federation: Federation) -> Member:
    store = open_store(StateFolder(federation.state).database_url())
    try:
        (member,) = store.members(store.list_runs()[0].run_id)
        return member
    finally:
        store.close()
