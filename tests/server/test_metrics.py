"""What Prometheus is told of a run, against what the run's history says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedmpq.method.history import PHASES
from fedmpq.server.metrics import ServerMetrics
from fedmpq.server.run_history import run_history
from tests.server.loopback import federation, run_all, small_config

Samples = dict[tuple[str, ...], float]


def collected(metrics: ServerMetrics) -> Samples:
    """By a sample's name and its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_a_run_in_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(name="garden", rounds=4))
            clients = await server.clients(2, 8)
            metrics = ServerMetrics(server.coordinator)
            seen: list[Samples] = []
            server.connections.changed.ring()

            async def look() -> None:
                while True:
                    seen.append(collected(metrics))
                    await asyncio.sleep(0.01)

            looking = asyncio.ensure_future(look())
            assert await run_all(clients) == ["finished", "finished"]
            looking.cancel()
            history = run_history(server.store, server.store.run(run.run_id))
            await check(metrics, history.rounds, seen)

    async def check(metrics: ServerMetrics, rounds: tuple, seen: list[Samples]) -> None:
        at_the_end = collected(metrics)
        for phase in PHASES:
            spent = sum(one.phases.get(phase, 0.0) for one in rounds)
            assert at_the_end["fedmpq_phase_seconds_total", phase] == pytest.approx(spent)
        at_work = [one for one in seen if ("fedmpq_score", "garden") in one]
        assert at_work, "no round was measured while the run was at work"
        known = {one.mean_deployed for one in rounds}
        assert {one["fedmpq_score", "garden"] for one in at_work} <= known
        assert {one["fedmpq_loss", "garden"] for one in at_work} <= {one.loss for one in rounds}
        by_budget = {(budget, score) for one in rounds for budget, score in one.deployed.items()}
        for one in at_work:
            for budget in ("2", "8"):
                assert (budget, one["fedmpq_budget_score", "garden", budget]) in by_budget
        assert at_work[0]["fedmpq_board_away_seconds", "client-0"] == 0.0

    asyncio.run(scenario())


def test_the_age_of_a_board_grows_while_it_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            stream = client.listen()
            await stream.read()
            metrics = ServerMetrics(server.coordinator)
            assert collected(metrics)["fedmpq_board_away_seconds", client.name] == 0.0
            stream.cancel()
            await server.until(lambda: len(server.connections) == 0)
            server.pass_time(500.0)
            assert 500.0 <= collected(metrics)["fedmpq_board_away_seconds", client.name] < 600.0

    asyncio.run(scenario())
