"""`fedmpq status` against a service at a real socket, and where none answers."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedmpq.cli.main import main
from fedmpq.method.state import ClientRecord
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.status_report import run_line, status_line, status_table
from fedmpq.server.status_text import bytes_text, seconds_text, short_name, widths_text
from fedmpq.server.store.records import Member, Seat, TrainingCommit
from fedmpq.server.store.sql import open_store
from fedmpq.server.tokens import make_token
from tests.cli.administered import RUN_ID, Administered, administered

Capture = pytest.CaptureFixture[str]
SCRIPT = Path(sys.executable).with_name("fedmpq")


def run(capsys: Capture, *words: str | Path) -> tuple[int, str, str]:
    code = main(["status", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "tls").mkdir(parents=True)
    return folder


@pytest.fixture
def server(state: Path) -> Iterator[Administered]:
    with administered(state) as servicer:
        yield servicer


# A server that runs


def test_the_table(server: Administered, state: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "--state", state)
    assert (code, err) == (0, "")
    facts = dict(re.split(r"  +", line.rstrip(), maxsplit=1) for line in out.splitlines()[:6])
    assert facts == {
        "run": "night (01234567), running",
        "round": "3 of 20; round 4 has 1 of 4 updates",
        "bytes": "up 1.23 MB, down 7.65 MB",
        "accuracy": "62.5%; 2 bits 50.0%, 10 bits 75.0%",
        "bit-widths": "248",
        "last round": "6.8 s, loss 1.234, 3 updates, 1 rejected, 2 cut",
    }
    assert [" ".join(line.split()) for line in out.splitlines()[-2:]] == [
        "● camera-1 training 4 12,345 87.5% 999 B 1.00 MB 234 native (neon_dot)",
        "○ camera-2 away 2.5 0 – 0 B 0 B – –",
    ]


def test_it_fits_80_columns_with_names_first(server: Administered, state: Path, capsys: Capture) -> None:
    """And says who is waited for, and since when."""
    near, away = server.status.clients
    near.name, away.name = "camera-in-the-old-orchard-1", "camera-in-the-old-orchard-2"
    near.samples, near.max_samples = 1_234_567, 400
    away.client, away.state = 3, "training"
    away.last_seen.FromSeconds(server.status.time.seconds - 130)
    server.status.run.opened.FromSeconds(server.status.time.seconds - 65)
    server.status.run.deadline.FromSeconds(server.status.time.seconds + 600)
    away.reason = "it was asked twice " * 9
    shown = io.StringIO()
    Console(file=shown, width=80, markup=False).print(status_table(server.status, 80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines if line[:1] in ("●", "○")]
    assert rows == [
        "● camera-in-th…d-orchard-1 training 4 400/1,234,567 87.5% 999 B 1.00 MB",
        "○ camera-in-th…d-orchard-2 away 2 min 2.5 0 – 0 B 0 B",
    ]
    text = " ".join(shown.getvalue().split())
    waits = "camera-in-th…d-orchard-1 (training), camera-in-th…d-orchard-2 (away)"
    assert f"waits for {waits}; 65 s so far, at most 10 min more bytes" in text
    assert "orchard-2 training: it was asked twice" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (1e6, "12 days")]
)
def test_how_long_in_one_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@given(st.text(st.characters(categories=["L", "N"]), max_size=60), st.integers(3, 30))
def test_a_long_name_keeps_both_ends(name: str, most: int) -> None:
    short = short_name(name, most)
    assert len(short) <= most
    head, cut, tail = short.partition("…")
    assert short == name if len(name) <= most else (cut and name.startswith(head) and name.endswith(tail))


def test_the_same_for_a_program(server: Administered, state: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "--state", state, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    facts = json.loads(out)
    assert facts["running"] is True
    assert facts["time"] == "2030-03-17T17:46:41.000Z"
    assert facts["run"]["run_id"] == RUN_ID
    assert facts["run"]["metrics"]["deployed_accuracy"] == {"2": 0.5, "10": 0.75}
    assert facts["run"]["metrics"]["bit_widths"] == [2, 4, 8]
    assert facts["run"]["ended"] is None
    near, away = facts["clients"]
    assert (near["client"], near["bit_widths"], near["accuracy"]) == (7, [2, 3, 4], 0.875)
    assert (away["client"], away["bit_widths"], away["accuracy"]) == (None, [], None)


def test_a_calibration_counts_statistics(server: Administered, state: Path, capsys: Capture) -> None:
    server.status.run.phase = "calibration"
    server.status.run.reason = "1 of statistics of 4"
    server.status.run.metrics.calibrated_on = "clients"
    server.status.run.metrics.calibrated_by = 4
    _, out, _ = run(capsys, "--state", state)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:2] == [
        "run night (01234567), running",
        "round 3 of 20; its calibration has 1 of 4 statistics",
    ]
    facts = json.loads(run(capsys, "--state", state, "--json")[1])["run"]
    assert facts["phase"] == "calibration"
    assert (facts["metrics"]["calibrated_on"], facts["metrics"]["calibrated_by"]) == ("clients", 4)
    assert "running, round 3/20, 1/4 statistics, accuracy 62.5%" in status_line(server.status)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (pb.ServerStatus, None),
        (pb.RunStatus, "run"),
        (pb.RoundMetrics, "metrics"),
        (pb.ClientStatus, "client"),
    ],
)
def test_no_field_is_left_out_of_the_json(
    server: Administered, state: Path, capsys: Capture, message: type[Message], name: str | None
) -> None:
    facts = json.loads(run(capsys, "--state", state, "--json")[1])
    found = {
        None: facts,
        "run": facts["run"],
        "metrics": facts["run"]["metrics"],
        "client": facts["clients"][0],
    }[name]
    assert found.keys() - {"running"} == {field.name for field in message.DESCRIPTOR.fields}


def test_a_server_with_nothing_to_tell(server: Administered, state: Path, capsys: Capture) -> None:
    server.status = pb.ServerStatus(server_version="1")
    assert run(capsys, "--state", state) == (0, "no run yet\nno client has enrolled\n", "")
    facts = json.loads(run(capsys, "--state", state, "--json")[1])
    assert (facts["run"], facts["clients"], facts["time"]) == (None, [], None)


def test_what_a_client_says_cannot_steer_the_terminal(
    server: Administered, state: Path, capsys: Capture
) -> None:
    server.status.clients[0].engine = "\x1b[2J\x07[bold]evil[/bold]\n:smiley:"
    code, out, _ = run(capsys, "--state", state)
    assert code == 0
    assert "?[2J?[bold]evil[/bold]?:smiley:" in out
    assert "\x1b" not in out


def test_an_error_of_the_server_is_one_line(server: Administered, state: Path, capsys: Capture) -> None:
    server.refusal = (grpc.StatusCode.INTERNAL, "out of disk")
    code, out, err = run(capsys, "--state", state)
    assert (code, out) == (2, "")
    assert err == "fedmpq status: the server failed to answer (INTERNAL): out of disk\n"


def test_the_socket_of_a_long_path_is_found_from_near_by(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / ("x" * 60) / ("y" * 60)
    (state / "tls").mkdir(parents=True)
    monkeypatch.chdir(state.parent)
    with administered(state):
        assert run(capsys, "--state", state)[0] == 0
        monkeypatch.chdir("/")
        code, out, err = run(capsys, "--state", state)
        assert (code, out) == (2, "")
        assert "too long for a socket" in err
        assert "at most 107" in err
        assert "shorter --state" in err


# No server


def test_no_folder_at_all(tmp_path: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "--state", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err == f"fedmpq status: {tmp_path / 'nothing'} is no server's folder; name it with --state\n"


def committed_run(state: Path, calibrating: bool = False) -> None:
    """A store with a run of two rounds, one merged; open is the other, or the calibration of the first."""
    store = open_store(StateFolder(state).database_url())
    try:
        token = make_token(datetime.now(timezone.utc))
        store.add_token(token.record)
        client_id = store.enrol(token.record.digest, "camera-1", 4.0, "1", b"s" * 32, None, time.time())
        stored = store.queue_run("night", {"rounds": 2}, ["a", "b"], b"g" * 32, b"m" * 32, 1.9e9)
        seat = Seat(0, (4, 4), b"p" * 32, 10)
        members = [Member(client_id, ClientRecord(0, 4.0, 100))]
        options: Any = {"target": 1, "deadline": None, "seats": [seat], "now": 1.9e9}
        store.open_round(stored.run_id, 1, members=members, bit_widths=(4, 4), **options)
        metrics = {
            "round": 1,
            "deployed_accuracy": {"4": 0.5},
            "mean_deployed_accuracy": 0.5,
            "measured_by": "server",
            "loss": 1.0,
            "seconds": 2.0,
            "updates": 1,
            "rejected": 0,
            "cut": 0,
            "bytes_up": 11,
            "bytes_down": 10,
            "bit_widths": [3, 4],
            "extended": 0,
            "calibrated_on": "",
        }
        record = ClientRecord(0, 4.0, 100, (4, 4), (3, 4))
        result = TrainingCommit(
            round=1,
            last=False,
            ready=not calibrating,
            model=b"n" * 32,
            bit_widths=(3, 4),
            records=[record],
            accuracies={0: 0.5},
            bytes_up={0: 11},
            bytes_down={0: 10},
            metrics=metrics,
            keep_models=1,
        )
        store.commit_round(stored.run_id, result, 1.9e9)
        if calibrating:
            store.open_calibration(stored.run_id, 1, deadline=None, seats=[seat], now=1.9e9)
        else:
            store.open_round(stored.run_id, 2, members=[], bit_widths=(3, 4), **options)
    finally:
        store.close()


def test_what_the_folder_remembers(state: Path, capsys: Capture) -> None:
    committed_run(state)
    code, out, err = run(capsys, "--state", state)
    assert code == 2
    start = f"fedmpq server run.toml --state {state}"
    assert err == f"fedmpq status: no server runs in {state}; start it: {start}\n"
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("run night (")
    assert lines[1:5] == [
        "round 1 of 2; round 2 has 0 of 1 updates",
        "bytes up 11 B, down 10 B",
        "accuracy 50.0%; 4 bits 50.0%",
        "bit-widths 34",
    ]
    assert lines[-1] == "○ camera-1 away 4 0 50.0% 11 B 10 B 44 –"
    code, out, _ = run(capsys, "--state", state, "--json")
    facts = json.loads(out)
    assert (code, facts["running"]) == (2, False)
    assert facts["run"]["metrics"]["bit_widths"] == [3, 4]
    assert facts["run"]["phase"] == "training"
    assert facts["run"]["metrics"]["calibrated_on"] is facts["run"]["metrics"]["calibrated_by"] is None
    assert facts["clients"][0]["connected"] is False


def test_a_calibration_that_the_folder_remembers(state: Path, capsys: Capture) -> None:
    committed_run(state, calibrating=True)
    code, out, _ = run(capsys, "--state", state)
    assert code == 2
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1] == "round 1 of 2; its calibration has 0 of 1 statistics"
    facts = json.loads(run(capsys, "--state", state, "--json")[1])
    assert (facts["run"]["phase"], facts["run"]["round"]) == ("calibration", 1)
    assert (facts["run"]["selected"], facts["run"]["updates"]) == (1, 0)


def test_a_round_that_an_aborted_run_left_open_is_over(state: Path, capsys: Capture) -> None:
    committed_run(state)
    store = open_store(StateFolder(state).database_url())
    store.abort_run(store.list_runs()[0].run_id, "aborted by the operator", time.time())
    store.close()
    facts = json.loads(run(capsys, "--state", state, "--json")[1])
    assert (facts["run"]["state"], facts["run"]["selected"]) == ("aborted", 0)
    assert facts["clients"][0]["state"] == ""


def test_the_socket_of_a_killed_server_is_no_server(state: Path, capsys: Capture) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(state / "admin.sock"))
    code, out, err = run(capsys, "--state", state)
    assert (code, out) == (2, "no run yet\nno client has enrolled\n")
    assert "no server runs in" in err


def test_watching_where_nothing_runs_ends_at_once(state: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "--state", state, "--watch")
    assert code == 2
    assert "no server runs in" in err


# Watching


def watching(state: Path, *words: str) -> subprocess.Popen[str]:
    command = [str(SCRIPT), "status", "--watch", "--state", str(state), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)


def line_of(process: subprocess.Popen[str], seconds: float = 30.0) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], seconds)[0], "nothing came"
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_every_change_is_a_line_where_no_terminal_is(
    server: Administered, state: Path, as_json: bool
) -> None:
    with watching(state, *(["--json"] if as_json else [])) as watch:
        first = line_of(watch)
        server.status.run.round = 4
        server.changes.put(server.status)
        second = line_of(watch)
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=30)
    if as_json:
        assert [json.loads(line)["run"]["round"] for line in (first, second)] == [3, 4]
    else:
        told = "running, round {}/20, 1/4 updates, accuracy 62.5%, up 1.23 MB, down 7.65 MB"
        assert f"night (01234567): {told.format(3)}, 1/2 clients connected\n" == first
        assert told.format(4) in second
    assert (watch.returncode, err) == (0, "")


@pytest.mark.slow
def test_watching_goes_on_when_the_server_comes_back(state: Path) -> None:
    with administered(state):
        watch = watching(state, "--json")
        assert json.loads(line_of(watch))["run"]["round"] == 3
    with watch, administered(state):
        assert json.loads(line_of(watch))["run"]["round"] == 3
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=30)
    assert "has stopped; waiting for it to come back" in err
    assert watch.returncode == 0


def test_a_terminal_gets_a_table_that_changes(server: Administered, state: Path) -> None:
    leader, follower = pty.openpty()
    words = [str(SCRIPT), "status", "--watch", "--state", str(state)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    watch = subprocess.Popen(words, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    try:
        shown = read_until(leader, "camera-2")
        assert "3 of 20" in shown
        server.status.run.round = 5
        server.changes.put(server.status)
        again = read_until(leader, "camera-2")
        assert "5 of 20" in again
        assert "\x1b[1A" in again, "it is drawn over the last one, not below it"
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 0
    finally:
        watch.kill()
        watch.wait()
        os.close(leader)


def read_until(terminal: int, text: str, seconds: float = 30.0) -> str:
    shown = ""
    end = time.monotonic() + seconds
    while text not in shown:
        left = end - time.monotonic()
        assert left > 0, f"{text!r} never came; there was {shown!r}"
        if select.select([terminal], [], [], left)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


# For people


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("running", "", "running"),
        ("running", "1 of 4 updates", "running"),
        ("waiting", "2 of 4 clients ready", "waiting: 2 of 4 clients ready"),
        ("paused", "paused by the operator", "paused by the operator"),
        ("aborted", "the operator", "aborted: the operator"),
    ],
)
def test_a_state_and_its_reason(state: str, reason: str, text: str) -> None:
    run = pb.RunStatus(run_id=RUN_ID, name="night", state=state, reason=reason, rounds=2)
    assert run_line(run) == f"night (01234567): {text}, round 0/2"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9995, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (12_345_678_901, "12.3 GB"),
        (10**16, "10000 TB"),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_bit_widths_of_few_and_of_many_layers() -> None:
    assert widths_text(b"") == "–"
    assert widths_text(bytes([1, 8, 4])) == "184"
    assert widths_text(bytes([4] * 30 + [2] * 3)) == "3x2 30x4"
