"""`fedmpq runs` against a service at a real socket: which run it means, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fedmpq.cli.main import main
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.sql import open_store
from tests.cli.administered import OLDER_ID, RUN_ID, Administered, administered

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "tls").mkdir(parents=True)
    return folder


@pytest.fixture
def server(state: Path) -> Iterator[Administered]:
    with administered(state) as servicer:
        yield servicer


def run(capsys: Capture, state: Path, *words: str | Path) -> tuple[int, str, str]:
    try:
        code = main(["runs", *map(str, words), "--state", str(state)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def mistake(capsys: Capture, state: Path, *words: str | Path) -> str:
    code, out, err = run(capsys, state, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("fedmpq runs: ").rstrip()


# The list


def test_the_list(server: Administered, state: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, state)
    assert (code, err) == (0, "")
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "run name state round up down accuracy created",
        "01234567 night running 3/20 1.23 MB 7.65 MB 62.5% 2030-03-17 17:46",
        "0123ffff day finished 5/5 0 B 0 B – –",
    ]
    code, out, _ = run(capsys, state, "--json")
    facts = json.loads(out)
    assert (code, facts["running"]) == (0, True)
    assert [(entry["run_id"], entry["state"]) for entry in facts["runs"]] == [
        (RUN_ID, "running"),
        (OLDER_ID, "finished"),
    ]


def test_an_empty_list_says_how_to_begin(server: Administered, state: Path, capsys: Capture) -> None:
    server.runs = []
    assert run(capsys, state) == (0, "no run yet; fedmpq runs start FILE queues one\n", "")


def test_without_a_server_the_folder_is_read(state: Path, capsys: Capture) -> None:
    store = open_store(StateFolder(state).database_url())
    for name in ("first", "second"):
        store.queue_run(name, {"rounds": 7}, ["a", "b"], b"g" * 32, b"m" * 32, 1.9e9)
    store.close()
    code, out, err = run(capsys, state)
    assert code == 2
    assert [line.split()[1:4] for line in out.splitlines()[1:]] == [
        ["second", "waiting", "0/7"],
        ["first", "waiting", "0/7"],
    ]
    assert (
        err == f"fedmpq runs: no server runs in {state}; start it: fedmpq server run.toml --state {state}\n"
    )
    code, out, _ = run(capsys, state, "--json")
    assert (code, json.loads(out)["running"], len(json.loads(out)["runs"])) == (2, False, 2)


def test_nothing_can_be_changed_without_a_server(state: Path, capsys: Capture) -> None:
    assert mistake(capsys, state, "pause").startswith(f"no server runs in {state}; start it")
    missing = mistake(capsys, state / "nothing", "pause")
    assert missing == f"{state / 'nothing'} is no server's folder; name it with --state"


# Changing a run


@pytest.mark.parametrize(
    ("verb", "after"), [("pause", "paused"), ("resume", "running"), ("abort", "aborted")]
)
@pytest.mark.parametrize(
    ("target", "run_id"), [(RUN_ID, RUN_ID), ("night", RUN_ID), ("01234", RUN_ID), ("day", OLDER_ID)]
)
def test_a_run_by_its_id_its_name_or_a_beginning(
    server: Administered, state: Path, capsys: Capture, verb: str, after: str, target: str, run_id: str
) -> None:
    code, out, err = run(capsys, state, verb, target)
    assert (code, err) == (0, "")
    assert server.asked == [(verb, run_id)]
    assert f": {after}, round " in out


def test_the_run_at_work_need_not_be_named(server: Administered, state: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, state, "pause", "--json")
    assert (code, json.loads(out)["state"]) == (0, "paused")
    assert run(capsys, state, "resume")[:2] == (0, "night (01234567): running, round 3/20\n")
    assert server.asked == [("pause", RUN_ID), ("resume", RUN_ID)]


def test_what_cannot_be_undone_must_be_named(server: Administered, state: Path, capsys: Capture) -> None:
    assert mistake(capsys, state, "abort") == "abort needs the run to abort; fedmpq runs lists them"
    assert mistake(capsys, state, "start") == "start needs a run.toml"
    assert server.asked == []


def test_a_run_that_is_not_clear(server: Administered, state: Path, capsys: Capture) -> None:
    there = "there are: night (01234567), day (0123ffff)"
    assert mistake(capsys, state, "pause", "0123") == f"'0123' means more than one run; {there}"
    assert mistake(capsys, state, "pause", "dusk") == f"'dusk' means no run; {there}"
    assert mistake(capsys, state, "pause", "") == f"'' means no run; {there}"
    server.status = pb.ServerStatus()
    assert mistake(capsys, state, "pause") == "the server has no run yet; fedmpq runs start FILE queues one"
    assert server.asked == []


def test_a_new_run(server: Administered, state: Path, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "runs" / "new.toml"
    file.parent.mkdir()
    file.write_text('name = "new"\n')
    assert run(capsys, state, "start", file) == (0, "new (ffffffff): waiting: 2 before it, round 0/3\n", "")
    assert server.asked == [("start", ('name = "new"\n', str(file.parent)))]
    assert "No such file" in mistake(capsys, state, "start", tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("rounds = 3\n", 'name = "new-1"\nrounds = 3\n'),
        ('rounds = 3\nname = "other"\n', 'rounds = 3\nname = "other"\n'),
        ("rounds 3\n", "rounds 3\n"),
    ],
)
def test_a_run_without_a_name_gets_its_files(
    server: Administered, state: Path, capsys: Capture, tmp_path: Path, text: str, sent: str
) -> None:
    file = tmp_path / "new-1.toml"
    file.write_text(text)
    assert run(capsys, state, "start", file)[0] == 0
    assert server.asked == [("start", (sent, str(tmp_path)))]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "run 'night' is finished"),
        (grpc.StatusCode.INVALID_ARGUMENT, "run 'night' is finished"),
        (grpc.StatusCode.INTERNAL, "the server failed to answer (INTERNAL): run 'night' is finished"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "the server failed to answer (DEADLINE_EXCEEDED): run 'night'"),
    ],
)
def test_what_the_server_does_not_do_is_one_line(
    server: Administered, state: Path, capsys: Capture, code: grpc.StatusCode, line: str
) -> None:
    server.refusal = (code, "run 'night' is finished")
    assert mistake(capsys, state, "abort", RUN_ID).startswith(line)


def test_an_unknown_verb(server: Administered, state: Path, capsys: Capture) -> None:
    assert "invalid choice: 'stop'" in mistake(capsys, state, "stop")
