"""Runs as a state folder holds them, read beside the server that works on them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fedmpq.server.state_folder import StateFolder
from fedmpq.server.stored_run import read_stored_run
from tests.server.loopback import federation, run_all, small_config


def test_without_a_name_it_is_the_newest_run_that_has_a_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(rounds=1))
            clients = await server.clients(4, 4)
            await run_all(clients)
            server.queue(replace(small_config(), name="begun", min_clients=5))
            stored = await asyncio.to_thread(read_stored_run, StateFolder(tmp_path))
            assert stored.run.name == "small"

    asyncio.run(scenario())
