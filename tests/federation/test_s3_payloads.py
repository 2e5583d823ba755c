"""Payloads in an S3 store: the same model to the bit, also when the store is away in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federation.federation import Federation, assert_same
from tests.s3 import S3, running_s3


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with running_s3(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.slow
def test_the_store_of_payloads_is_away_for_a_while(tmp_path: Path, s3: S3) -> None:
    with Federation(tmp_path, (2, 8), {"rounds": 4}) as federation:
        server = federation.start_server("--blobs", s3.url("payloads"))
        federation.start_boards()
        server.wait_for("round merged run=parts round=1 ")
        s3.stop()
        server.wait_for("cannot be reached")
        assert server.running
        s3.start()
        assert_same(federation.finish(), federation.simulated())
        assert "Traceback" not in server.text()
    assert any((tmp_path / "s3" / "buckets").rglob("database-id"))
    assert not (federation.state / "blobs").exists()


@pytest.mark.slow
def test_a_server_waits_for_its_payloads(tmp_path: Path, s3: S3) -> None:
    with Federation(tmp_path, (4,), {"rounds": 1}) as federation:
        s3.stop()
        starting = federation.begin_server("--blobs", s3.url("payloads"))
        starting.wait_for("waiting for the payloads")
        s3.start()
        starting.wait_for("listening on")
        assert starting.terminate() == 0
