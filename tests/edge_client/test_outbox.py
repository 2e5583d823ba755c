"""The update that waits: there after a crash, whole, and only once."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest

from fedmpq.edge_client import outbox
from fedmpq.edge_client.outbox import Outbox, RoundKey
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import digest

KEY = RoundKey("run-1", 3, "training", b"\1" * 32)
UPDATE = bytes(range(256)) * 100


@pytest.mark.parametrize("phase", get_args(Phase))
def test_an_update_survives(tmp_path: Path, phase: Phase) -> None:
    key = KEY._replace(phase=phase)
    assert Outbox(tmp_path / "box").pending() is None
    put = Outbox(tmp_path / "box").put(key, UPDATE)
    found = Outbox(tmp_path / "box").pending()
    assert found == put
    assert (found.key, found.payload, found.size) == (key, digest(UPDATE), len(UPDATE))
    assert found.path.read_bytes() == UPDATE


def test_a_new_one_takes_its_place(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.put(KEY, UPDATE)
    box.put(KEY._replace(round=4), UPDATE + b"!")
    found = box.pending()
    assert found is not None
    assert (found.key.round, found.size) == (4, len(UPDATE) + 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_cleared_is_empty(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.put(KEY, UPDATE)
    box.clear()
    assert box.pending() is None
    assert list(tmp_path.iterdir()) == []


def test_a_crash_before_the_index_leaves_nothing_to_send(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.put(KEY, UPDATE)
    (tmp_path / "pending.json").unlink()
    assert box.pending() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "index"])
def test_what_the_disk_did_not_keep_is_thrown_away(tmp_path: Path, harm: str) -> None:
    box = Outbox(tmp_path)
    path = box.put(KEY, UPDATE).path
    if harm == "cut":
        path.write_bytes(UPDATE[:-1])
    elif harm == "flipped":
        path.write_bytes(b"?" + UPDATE[1:])
    elif harm == "gone":
        path.unlink()
    else:
        (tmp_path / "pending.json").write_text('{"run_id": "run-1"')
    assert box.pending() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", [None, "distillation", 1])
def test_an_answer_of_no_known_phase_is_thrown_away(tmp_path: Path, phase: object) -> None:
    """Such as one that an older version has left, or a newer one before it was put back."""
    box, index = Outbox(tmp_path), tmp_path / "pending.json"
    box.put(KEY, UPDATE)
    record = json.loads(index.read_text())
    if phase is None:
        del record["phase"]
    else:
        record["phase"] = phase
    index.write_text(json.dumps(record))
    assert box.pending() is None
    assert list(tmp_path.iterdir()) == []


def test_an_update_under_the_folders_former_name_is_still_delivered(tmp_path: Path) -> None:
    Outbox(tmp_path / "mailbox").put(KEY, UPDATE)
    with closing(StateFolder(tmp_path)) as state:
        found = state.outbox.pending()
    assert found is not None
    assert (found.key, found.path.read_bytes()) == (KEY, UPDATE)
    assert not (tmp_path / "mailbox").exists()


def test_who_does_not_wait_delivers_while_it_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, may_flush = list[Path](), threading.Event()

    def held(path: Path) -> None:
        assert may_flush.wait(60)
        flushed.append(path)

    monkeypatch.setattr(outbox, "flush", held)
    box = Outbox(tmp_path)
    put = box.put(KEY, UPDATE, wait=False)
    assert put.path.read_bytes() == UPDATE
    assert not flushed
    may_flush.set()
    assert box.pending() == put
    assert flushed == [put.path, tmp_path]
    box.put(KEY, UPDATE, wait=False)
    box.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_keeps_nothing_does_not_hold_a_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox, "flush", full)
    box = Outbox(tmp_path)
    assert box.put(KEY, UPDATE, wait=False).path.read_bytes() == UPDATE
    assert box.pending() is None
    assert "not kept for after a crash" in caplog.text
