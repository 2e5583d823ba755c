"""Settings of a run that exists: which change, how they are checked, and when they hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.run_config import ConfigError, difference, make_config
from fedmpq.server.run_settings import OPERATIONAL, changed_config, other_operation
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.records import Run, RunState
from tests.server.loopback import PATIENCE, close_all, federation, run_all, small_config


def stored(state: RunState = "running", merged: int = 2, **settings: Any) -> Run:
    config = small_config(**settings).to_dict()
    return Run(1, "id", "small", config, ("a",), state, "", b"g", b"m", (4,), merged, merged, 0, 0, 0.0, None)


def test_settings_change_and_go_back_to_their_defaults() -> None:
    run = stored(deadline_seconds=5, export=["onnx"])
    text = 'quorum = 0.5\nmin-clients = 2\nexport = ["executorch"]'
    changed = changed_config(run, text, ["deadline_seconds"])
    expected = small_config(quorum=0.5, min_clients=2, export=["executorch"])
    assert changed == expected
    assert changed_config(run, "", ["export"]).export == ()


@pytest.mark.parametrize(
    ("text", "defaults", "message"),
    [
        ("seed = 3", [], "seed defines what run 'small' computes"),
        ('method = "aqfl"', [], "method defines"),
        ("", ["model"], "model defines"),
        ("quorum = 1.5", [], "quorum = 1.5 is outside"),
        ("quorums = 1", [], "did you mean 'quorum'"),
        ("", ["quorums"], "did you mean 'quorum'"),
        ("rounds = 2", [], "has merged 2 already"),
        ("clients_per_round = 4\nmin_clients = 2", [], "below clients_per_round"),
        ("quorum", [], "not valid TOML"),
        ("", [], "name a setting"),
    ],
)
def test_a_change_is_checked(text: str, defaults: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed_config(stored(), text, defaults)


def test_a_run_that_is_over_changes_only_to_go_on() -> None:
    finished = stored("finished", 3)
    assert changed_config(finished, "rounds = 4", []).rounds == 4
    with pytest.raises(ConfigError, match="rounds=4 or more lets it go on"):
        changed_config(finished, "quorum = 0.5", [])
    with pytest.raises(ConfigError, match="was aborted"):
        changed_config(stored("aborted"), "rounds = 9", [])


def test_a_file_that_differs_in_how_a_run_is_operated_is_of_the_same_run() -> None:
    run = stored(quorum=0.5)
    holding, said = make_config(run.config), small_config(quorum=0.75)
    assert difference(holding, said, but=OPERATIONAL) is None
    assert other_operation(run, said) == {"quorum": "0.5 holds, not 0.75"}
    assert difference(holding, replace(said, seed=1), but=OPERATIONAL) == "seed = 0 there and 1 here"


def test_a_finished_run_goes_on_with_more_rounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1))
            clients = await server.clients(4, 8)
            assert await run_all(clients) == ["finished"] * 2
            await server.until(lambda: server.coordinator.active is None)
            await server.coordinator.controls.configure(run.run_id, "rounds = 3", [])
            again = server.store.run(run.run_id)
            assert (again.state, again.ended, again.round) == ("running", None, 1)
            assert await run_all(clients) == ["finished"] * 2
            ended = server.store.run(run.run_id)
            assert (ended.state, ended.round, ended.ready) == ("finished", 3, 3)
            assert [len(client.receipts) for client in clients] == [3, 3]

    asyncio.run(scenario())


def test_more_rounds_that_come_while_the_last_is_merged_are_not_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, profile="paper"))
            clients = await server.clients(4, 8)
            commit, store = server.store.commit_round, server.store

            def late(run_id: str, result: Any, now: float) -> Run:
                store.commit_round = commit  # type: ignore[method-assign]
                known = store.run(run_id).config
                store.configure_run(run_id, known, {**known, "rounds": 2})
                return commit(run_id, result, now)

            store.commit_round = late  # type: ignore[method-assign]
            assert await run_all(clients) == ["finished"] * 2
            assert store.run(run.run_id).round == 2
            assert [len(client.receipts) for client in clients] == [2, 2]

    asyncio.run(scenario())


def test_a_deadline_holds_for_the_open_round_and_after_a_crash(tmp_path: Path) -> None:
    async def never(assignment: pb.Assignment) -> None:
        """A client that is there and silent."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, deadline_seconds=0, profile="paper"))
            clients = await server.clients(4, 8)
            clients[1].work = never  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: bool(clients[0].receipts))
            await server.coordinator.controls.configure(
                run.run_id, "deadline_seconds = 400\nquorum = 0.5", []
            )
            current = server.store.current_round(run.run_id)
            assert current is not None
            assert current.deadline is not None
            await server.crash()
            await server.start()
            await server.until(lambda: server.coordinator.round is not None)
            assert server.store.run(run.run_id).round == 0
            server.pass_time(400)
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            await close_all(clients)

    asyncio.run(scenario())


def test_a_change_that_another_has_overtaken_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config())
            with pytest.raises(StoreError, match="changed meanwhile"):
                server.store.configure_run(run.run_id, {**run.config, "rounds": 9}, run.config)

    asyncio.run(scenario())
