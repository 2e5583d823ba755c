"""Two hundred clients at once: nothing fails, and the server keeps none of their updates in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.federation.crowd import served

ROUNDS = 3
FEW, MANY = 20, 200
RESNET20_WEIGHTS = 270_896


def test_memory_does_not_grow_with_the_crowd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = peak_after(tmp_path / "few", capsys, FEW)
    many = peak_after(tmp_path / "many", capsys, MANY)
    # A connection itself costs gRPC some read buffers of 64 KiB, 0.2 MB in all.
    update = 4 * RESNET20_WEIGHTS / 1e6
    assert (many - few) / (MANY - FEW) < update / 2, f"{many} MB with {MANY} clients, {few} MB with {FEW}"


def peak_after(folder: Path, capsys: pytest.CaptureFixture[str], clients: int) -> float:
    settings = {"rounds": ROUNDS, "clients_per_round": clients}
    with served(folder, capsys, **settings) as server:
        stand_ins = [server.stand_in(n, budget=(2, 4, 6, 8)[n % 4]) for n in range(clients)]

        async def all_rounds() -> list[str]:
            for one in stand_ins:
                await one.enrol(server.token)
            ended = await asyncio.gather(*(one.run() for one in stand_ins))
            await asyncio.gather(*(one.close() for one in stand_ins))
            return ended

        assert asyncio.run(all_rounds()) == ["finished"] * clients
        assert all(sorted(one.receipts) == list(range(1, ROUNDS + 1)) for one in stand_ins)
        peak = server.program.peak_mb()
        print(f"{clients} clients: {peak:.1f} MB")
        return peak
