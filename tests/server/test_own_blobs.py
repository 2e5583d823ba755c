"""A database and its blobs: which belong together, what is deleted, and how a run goes on without."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fedmpq.server.blobs import BlobError, BlobsAway, FolderBlobs
from fedmpq.server.database import sqlite_url
from fedmpq.server.held_updates import HeldUpdates
from fedmpq.server.own_blobs import open_own_blobs
from fedmpq.server.store.sql import open_store
from tests.server.facts import queue
from tests.server.loopback import (
    PATIENCE,
    close_all,
    expected_model,
    federation,
    same_model,
    small_config,
)
from tests.server.stand_in import StandIn
from tests.server.test_rounds import both_assigned
from tests.server.test_serve import RUN, Server, run_to_end


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["empty", "missing", "another"])
def test_a_start_with_another_database_deletes_nothing(tmp_path: Path, lost: str) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with Server(tmp_path, str(tmp_path / "run.toml")) as server:
        assert server.address
        assert server.program.terminate() == 0
    state = tmp_path / "state"
    before = names(state / "blobs")
    assert len(before) == 3, "a graph, a model and whose they are"
    for path in state.glob("fedmpq.db*"):
        path.rename(tmp_path / path.name)
    if lost == "empty":
        (state / "fedmpq.db").touch()
    elif lost == "another":
        other = open_store(sqlite_url(state / "fedmpq.db"))
        open_own_blobs(other, str(tmp_path / "others"), state / "blobs").put(b"something")
        other.remember(blobs="")
        other.close()
    for _ in range(2):
        code, output = run_to_end(tmp_path, "--listen", "127.0.0.1:0", "--exit-when-done")
        assert code == 2
        assert len(output.strip().splitlines()) == 1, output
        assert ("bring back the database" in output) or (lost == "missing" and "no server's folder" in output)
        assert names(state / "blobs") == before


@pytest.mark.slow
def test_blobs_elsewhere_are_remembered_and_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    elsewhere = tmp_path / "disk" / "blobs"
    with Server(tmp_path, str(tmp_path / "run.toml"), "--blobs", str(elsewhere)) as server:
        assert server.address
        assert server.program.terminate() == 0
    elsewhere.rename(tmp_path / "away")
    code, output = run_to_end(tmp_path, "--listen", "127.0.0.1:0")
    assert code == 2
    assert f"they were in {elsewhere}: bring that back" in output
    assert len(output.strip().splitlines()) == 1, output
    assert not elsewhere.exists()
    (tmp_path / "away").rename(elsewhere)
    with Server(tmp_path) as server:
        assert server.address
        assert f"payloads are where they were blobs={elsewhere}" in server.program.text()
        assert server.program.terminate() == 0


def test_only_what_was_recorded_is_swept(tmp_path: Path) -> None:
    async def scenario() -> None:
        stranger = FolderBlobs(tmp_path / "blobs")
        async with federation(tmp_path) as server:
            server.queue(small_config())
            unknown = stranger.put(b"of somebody else")
            unused = server.coordinator.blobs.put(b"recorded and not in use")
            assert unused in server.store.recorded_blobs()
            await server.crash()
            await server.start()
            await server.until(lambda: unused not in server.store.recorded_blobs())
            left = set(stranger.names())
            assert unknown in left
            assert unused not in left

    asyncio.run(scenario())


def test_a_store_from_before_there_were_ids_gets_one(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "fedmpq.db"))
    name = FolderBlobs(tmp_path / "blobs").put(b"model")
    store.record_blobs([name])
    queue(store)
    blobs = open_own_blobs(store, None, tmp_path / "blobs")
    assert blobs.owner() == store.fact("id")
    assert blobs.read(name) == b"model"
    shutil.rmtree(tmp_path / "blobs")
    with pytest.raises(BlobsAway, match="bring it back"):
        blobs.read(name)
    with pytest.raises(BlobsAway, match="bring it back"):
        blobs.put(b"other")
    with pytest.raises(BlobError, match="are not in"):
        open_own_blobs(store, None, tmp_path / "blobs")
    store.close()


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_model_that_is_lost_pauses_the_run_until_it_is_back(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(rounds=2)
            run = server.queue(config)
            await server.crash()
            model = tmp_path / "blobs" / run.model.hex()
            good = model.read_bytes()
            if damage == "missing":
                model.unlink()
            else:
                model.write_bytes(bytes([good[0] ^ 1]) + good[1:])
            for _ in range(2):
                await server.start()
                await server.until(lambda: server.store.run(run.run_id).state == "paused")
                assert "bring" in server.store.run(run.run_id).reason
                await server.crash()
            await server.start()
            await server.until(lambda: "bring" in server.store.run(run.run_id).reason)
            model.write_bytes(good)
            await server.coordinator.controls.resume(run.run_id)
            clients = await server.clients(4, 8)
            running = [asyncio.create_task(client.run()) for client in clients]
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            assert same_model(
                server.model(), expected_model(config, [(c.budget, c.samples) for c in clients])
            )
            await close_all(clients)

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_an_update_that_is_lost_is_asked_for_again(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, rounds=1)
            run = server.queue(config)
            first, second = await server.clients(4, 8)
            assignments = await both_assigned(first, second)
            update = first.update(assignments[0], await first.download(assignments[0].payload))
            receipt = await first.upload(run.run_id, 1, update)
            assert server.coordinator.round is not None
            # As after a restart: a merge reads what it does not have in memory.
            server.coordinator.round.work.held = HeldUpdates(0)
            blob = tmp_path / "blobs" / receipt.payload.hex()
            if damage == "missing":
                blob.unlink()
            else:
                blob.write_bytes(b"x" + update[1:])
            await close_all([first, second])
            assert await finish(first, second) == ["finished"] * 2
            assert first.receipts[1] == receipt, "the same answer has the same receipt"
            assert server.store.thrown_out(run.run_id) == []
            expected = expected_model(config, [(c.budget, c.samples) for c in (first, second)])
            assert same_model(server.model(), expected)
            await close_all([first, second])

    asyncio.run(scenario())


async def finish(*clients: StandIn) -> list[str]:
    running = [asyncio.create_task(client.run()) for client in clients]
    return await asyncio.wait_for(asyncio.gather(*running), PATIENCE)
