"""`fedmpq history` of a server's run and of a simulation, in every form."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedmpq.cli.main import main
from tests.server.loopback import federation, run_all, small_config
from tests.server.stand_in import StandIn
from tests.soak.clients import Liar

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's folder after a run of three rounds, in which one of three clients is shut out."""
    folder = tmp_path_factory.mktemp("history") / "state"
    (folder / "tls").mkdir(parents=True)

    async def scenario() -> None:
        async with federation(folder) as server:
            server.queue(small_config(name="garden", rounds=3, clients_per_round=3, quorum=0.5))
            clients: list[StandIn] = await server.clients(2, 8)
            liar = Liar(server.address, "client-2", 4.0, recorder=server.recorder("client-2"))
            await liar.enrol(server.token())
            assert await run_all([*clients, liar]) == ["finished", "finished", "shut out"]

    asyncio.run(scenario())
    return folder


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def answer(*words: str | Path, code: int = 0) -> str:
        assert main(["history", *map(str, words)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return answer


def test_a_table_within_80_columns(state: Path, ask: Ask) -> None:
    lines = ask("--state", state).splitlines()
    titles = "round loss mean 2 bit 8 bit up down clients seconds"
    assert " ".join(lines[0].split()) == titles
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
    assert "2 of 3" in lines[1]
    assert max(map(len, lines)) <= 80


def test_who_did_what_in_which_round(state: Path, ask: Ask) -> None:
    lines = ask("garden", "--state", state, "--format", "clients").splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["client-0", "TTT"],
        ["client-1", "TTT"],
        ["client-2", "RRR"],
    ]
    assert lines[4].startswith("round 1, client-2, rejected: it is of client")


def test_lines_for_programs(state: Path, ask: Ask, tmp_path: Path) -> None:
    assert ask("--state", state, "--format", "csv", "-o", tmp_path / "rounds.csv") == ""
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rounds.csv").read_text())))
    rounds: list[dict[str, Any]] = list(map(json.loads, ask(state, "--format", "jsonl").splitlines()))
    assert [int(row["rejected"]) for row in rows] == [1, 1, 1]
    for row, facts in zip(rows, rounds, strict=True):
        assert float(row["loss"]) == facts["loss"]
        assert float(row["seconds"]) == pytest.approx(sum(facts["phases"].values()))
        assert facts["measured_by"] == "boards"
        assert [one["name"] for one in facts["clients"]] == ["client-0", "client-1", "client-2"]


def test_a_picture(state: Path, ask: Ask, tmp_path: Path) -> None:
    ask("--state", state, "--format", "png", "-o", tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "png needs -o FILE" in ask("--state", state, "--format", "png", code=2)


def test_mistakes(state: Path, ask: Ask, tmp_path: Path) -> None:
    assert "holds no run 'kitchen'" in ask("kitchen", "--state", state, code=2)
    assert "is no server's folder, and no simulation's" in ask(tmp_path, code=2)


@pytest.mark.slow
def test_of_a_simulation(ask: Ask, tmp_path: Path) -> None:
    words = ["simulate", "--data", "digits", "--clients", "2", "--budgets", "2,4", "--rounds", "2"]
    words += ["--epochs", "1", "--participation", "1"]
    assert main([*words, "--train-limit", "200", "--test-limit", "50", "--out", str(tmp_path / "out")]) == 0
    ask(tmp_path / "out")
    rounds = [json.loads(line) for line in ask(tmp_path / "out", "--format", "jsonl").splitlines()]
    assert [facts["round"] for facts in rounds] == [1, 2]
    assert [one["name"] for one in rounds[0]["clients"]] == ["client-0", "client-1"]
    assert set(rounds[0]["phases"]) == {"training", "merging", "calibrating", "measuring"}
    assert rounds[0]["measured_by"] == "test data"
    ask(tmp_path / "out", "--format", "png", "-o", tmp_path / "run.png")
    assert (tmp_path / "run.png").is_file()
