"""PostgreSQL is stopped in the middle of a run: the server waits for it, and ends with the same model."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import postgres
from tests.databases import running_postgres
from tests.federation.federation import Federation, assert_same
from tools.programs import FEDMPQ, wait_until

AWAY_SECONDS = 7.0
"""Longer than anything in the server waits for a first answer."""


@dataclass(frozen=True)
class Own:
    """A PostgreSQL of the test's own, which it stops and starts."""

    url: str
    process: postgres.Process

    def stop(self) -> None:
        self.process.stop()

    def start(self) -> None:
        self.process.start()


@pytest.fixture
def own_postgres() -> Iterator[Own]:
    with running_postgres() as server:
        if server.process is None:
            pytest.skip(f"{postgres.SETTING} names a server that is not ours to stop")
        yield Own(server.url.render_as_string(hide_password=False), server.process)


def command(federation: Federation, *words: str) -> subprocess.CompletedProcess[str]:
    line = [*FEDMPQ, *words, "--state", str(federation.state)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_the_database_is_away_for_a_while(tmp_path: Path, own_postgres: Own) -> None:
    with Federation(tmp_path, (2, 8), {"rounds": 6}, own_postgres.url) as federation:
        server = federation.start_server()
        federation.start_boards()
        server.wait_for("round merged run=parts round=2 ")
        own_postgres.stop()
        began = time.monotonic()
        server.wait_for("the database fails; trying again")
        shown = command(federation, "status", "--json")
        assert shown.returncode == 0, shown.stderr
        assert "the database fails" in json.loads(shown.stdout)["run"]["reason"]
        for words in (("runs", "pause"), ("server", "token")):
            told = command(federation, *words)
            assert told.returncode == 2
            assert told.stderr.count("\n") == 1, told.stderr
            assert "Traceback" not in told.stderr
        wait_until(lambda: time.monotonic() - began > AWAY_SECONDS, "the outage to last", [server])
        assert server.running
        own_postgres.start()
        server.wait_for("the database answers again")
        assert_same(federation.finish(), federation.simulated())
        assert "Traceback" not in server.text()


def test_a_server_waits_for_its_database_to_start(tmp_path: Path, own_postgres: Own) -> None:
    with Federation(tmp_path, (4,), {"rounds": 1}, own_postgres.url) as federation:
        own_postgres.stop()
        starting = federation.begin_server()
        starting.wait_for("waiting for the database")
        own_postgres.start()
        starting.wait_for("listening on")
        assert starting.terminate() == 0
