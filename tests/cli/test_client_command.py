"""`fedmpq client` as a process: killed, stopped, over mutual TLS, small and quiet."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedmpq import kernels
from fedmpq.cli import client_command
from fedmpq.cli.main import main
from fedmpq.data.dataset import Dataset
from fedmpq.edge_client.client_process import STOP_SECONDS
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.proto import federation_pb2 as pb
from tests.cost import float_activations_mb, peak_mb_after
from tests.edge_client.fake_federation import (
    RUN,
    TOKEN,
    FakeFederation,
    RunningServer,
    Work,
    cut_after,
)
from tests.waiting import until

Made = Callable[..., Any]
FEDMPQ = Path(sys.executable).with_name("fedmpq")
PLAN = TrainingPlan(epochs=2, batch_size=8, update="carried", code_learning_rate=0.02)
RUN_ENDED = pb.Event(run_ended=pb.RunEnded(run_id=RUN, state="finished"))
_save: Any = np.savez  # its stub takes every keyword for the one flag it has


@dataclass
class Scene:
    folder: Path
    server: RunningServer
    data: Dataset
    work: Work

    @property
    def federation(self) -> FakeFederation:
        return self.server.federation

    def delivered(self) -> bool:
        """The server has given a receipt, and the client has it: the end of a run must not come before."""
        return bool(self.federation.receipts) and not any((self.folder / "state" / "outbox").iterdir())

    def words(self, *more: str, token: bool = True) -> list[str]:
        words = [str(FEDMPQ), "client", "--server", self.server.address, "--budget", "4"]
        words += ["--data", str(self.folder / "data.npz"), "--state", str(self.folder / "state")]
        words += ["--threads", "1", "--retry-least", "0.05", "--retry-most", "0.2", "--name", "board-1"]
        return [*words, *(["--token-file", str(self.folder / "token")] if token else []), *more]

    @contextmanager
    def client(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(self.words(*more), stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def finish(self, *more: str, code: int = 0) -> str:
        """Runs a client to its end; what it logged."""
        done = subprocess.run(self.words(*more), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr


@pytest.fixture
def scene(tmp_path: Path, make_model: Made, make_data: Made) -> Iterator[Scene]:
    server = RunningServer(FakeFederation())
    model, data = make_model(bits=4), make_data(60)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    _save(tmp_path / "data.npz", images=data.images, labels=data.labels, class_names=data.class_names)
    yield Scene(tmp_path, server, data, Work(model.graph, model.layers, model.side, PLAN))
    server.stop()


def wait_for_line(client: subprocess.Popen[str], part: str) -> None:
    assert client.stderr is not None
    for line in client.stderr:
        if part in line:
            return
    raise AssertionError(f"it ended without a line of {part!r}")


def endless(work: Work) -> Work:
    return replace(work, plan=replace(PLAN, epochs=10**6))


# A whole life


def test_a_run_from_the_command_line(scene: Scene) -> None:
    scene.federation.on_stream = [*scene.work.offer(scene.federation)]
    with scene.client("--exit-when-done") as client:
        until(scene.delivered)
        scene.federation.send(RUN_ENDED)
        _, log = client.communicate(timeout=60)
    assert client.returncode == 0
    assert scene.federation.complete() == [scene.work.update(scene.data)]
    assert scene.federation.names == ["board-1"]
    assert scene.federation.hellos[0].engine == f"native ({kernels.isa()})"
    for line in (
        f"{scene.folder / 'data.npz'}: 60 samples",
        "60 samples of 6x5x3",
        f"engine native ({kernels.isa()}) on 1 threads, budget 4 bits per weight",
        "enrolled as board-1 (client ",
        f"connected to {scene.server.address} (fedmpq 0.0)",
        "run run-1 (small): 3 rounds, 3 classes",
        "round 1 of 3, training: small at 4.00 bits per weight",
        "round 1: epoch 2 of 2: loss ",
        "round 1: update of 440 bytes delivered",
        "run run-1: finished",
    ):
        assert line in log
    assert TOKEN not in log


def test_the_log_as_json(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, evaluate=True)
    with scene.client("--exit-when-done", "--log-format", "json") as client:
        until(scene.delivered)
        scene.federation.send(RUN_ENDED)
        _, log = client.communicate(timeout=60)
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    assert {line["level"] for line in lines} == {"info"}
    epochs = [line for line in lines if "epoch" in line]
    assert [(line["run"], line["round"], line["epoch"]) for line in epochs] == [(RUN, 1, 1), (RUN, 1, 2)]
    assert [line["samples"] for line in lines if "correct" in line] == [60]


def test_mutual_tls_from_a_bundle(scene: Scene) -> None:
    from fedmpq.server import certificates

    authority = certificates.make_authority()
    served = certificates.issue_server(authority, [])
    issued = certificates.issue_client(authority, "board-7")
    ca = certificates.pem_of(authority.certificate)
    bundle = scene.folder / "board-7"
    bundle.mkdir()
    for name, data in (("ca.pem", ca), ("client.pem", issued.certificate), ("client.key", issued.key)):
        (bundle / name).write_bytes(data)
    (bundle / "token").write_text(f"{TOKEN}\n")
    scene.server.stop()
    credentials = grpc.ssl_server_credentials([(served.key, served.certificate)], ca, True)
    scene.server = RunningServer(scene.federation, credentials)
    scene.federation.on_stream = [RUN_ENDED]
    words = scene.words("--exit-when-done", "--bundle", str(bundle), token=False)
    del words[words.index("--name") : words.index("--name") + 2]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert scene.federation.names == ["board-7"]


# Killed and stopped


def test_a_server_of_another_authority_is_named_as_that(scene: Scene) -> None:
    """And none of gRPC's own lines come between the client's."""
    from fedmpq.server import certificates

    served = certificates.issue_server(certificates.make_authority(), [])
    scene.server.stop()
    credentials = grpc.ssl_server_credentials([(served.key, served.certificate)])
    scene.server = RunningServer(scene.federation, credentials)
    other = scene.folder / "ca.pem"
    other.write_bytes(certificates.pem_of(certificates.make_authority().certificate))
    with scene.client("--ca", str(other)) as client:
        assert client.stderr is not None
        for line in islice(client.stderr, 20):
            assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z ", line), line
            if "is not trusted (it answers, but its certificate is not signed by this client's" in line:
                break
        else:
            raise AssertionError("the authority was not named")


@pytest.mark.parametrize("way", ["standard input", "environment", "argument"])
def test_a_token_need_not_be_an_argument(scene: Scene, way: str) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    more = {"standard input": ["--token-file", "-"], "environment": [], "argument": ["--token", TOKEN]}[way]
    done = subprocess.run(
        scene.words("--exit-when-done", *more, token=False),
        input=f"{TOKEN}\n" if way == "standard input" else "",
        env=os.environ | ({"FEDMPQ_TOKEN": TOKEN} if way == "environment" else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert scene.federation.names == ["board-1"]
    assert ("--token shows the token to every user" in done.stderr) == (way == "argument")


def test_killed_while_it_trains_it_trains_the_round_anew(scene: Scene) -> None:
    scene.federation.on_stream = endless(scene.work).offer(scene.federation)
    with scene.client() as client:
        wait_for_line(client, "epoch 3 of")
    assert client.returncode == -signal.SIGKILL
    scene.federation.on_stream = scene.work.offer(scene.federation)
    with scene.client():
        until(scene.delivered)
    assert scene.federation.complete() == [scene.work.update(scene.data)]
    assert scene.federation.count("Enroll") == 1


@pytest.mark.slow
def test_killed_while_it_uploads_it_goes_on_and_does_not_train(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.upload = [cut_after(200)] + [cut_after(0)] * 1000
    with scene.client():
        until(lambda: scene.federation.count("Upload") >= 2)
    scene.federation.faults.upload = []
    before = len(scene.federation.calls)
    with scene.client("--exit-when-done") as client:
        until(scene.delivered)
        scene.federation.send(RUN_ENDED)
        _, log = client.communicate(timeout=60)
    assert "round 1: its update was not delivered yet" in log
    assert "epoch" not in log
    calls = [call for call in scene.federation.calls[before:] if call[0] != "Ready"]
    assert calls == [("GetUpload", 0), ("Upload", 200), ("Confirm", 0)]
    assert scene.federation.complete() == [scene.work.update(scene.data)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["waiting", "training", "no server"])
def test_a_signal_ends_it_soon_and_cleanly(scene: Scene, number: int, code: int, moment: str) -> None:
    if moment == "training":
        scene.federation.on_stream = endless(scene.work).offer(scene.federation)
    if moment == "no server":
        scene.server.stop()
    said = {"waiting": "connected", "training": "epoch 2 of", "no server": "cannot be reached"}[moment]
    began = time.monotonic()
    with scene.client() as client:
        wait_for_line(client, said)
        ready = time.monotonic()
        client.send_signal(number)
        _, log = client.communicate(timeout=60)
        ended = time.monotonic()
    # Training would go on for ever. To import what it needs took the same process longer than to end it may.
    assert ended - ready < STOP_SECONDS + (ready - began)
    assert client.returncode == code
    assert "stopping; what is not done goes on at the next start" in log
    assert "Traceback" not in log
    assert "Exception" not in log


# Mistakes


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["client", *words]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
        logging.getLogger("fedmpq.client").handlers.clear()
    out, err = capsys.readouterr()
    assert out == ""
    return err.rstrip().splitlines()[-1]


def test_mistakes_are_one_line_that_says_what_to_do(
    scene: Scene, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = ("--data", str(tmp_path / "data.npz"), "--state", str(tmp_path / "state"))
    here, far = ("--server", "localhost:50051"), ("--server", "192.0.2.1:50051")
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    for words, expected in (
        ((*far, "--budget", "4", *data), "there is no TLS: give --bundle DIR"),
        (("--server", "localhost", "--budget", "4", *data), "write HOST:PORT"),
        ((*here, "--budget", "9", *data), "--budget 9 is outside 1..8"),
        ((*here, "--budget", "4", *data, "--name", "a b"), "give a --name"),
        ((*here, "--budget", "4", *data, "--token", "a", "--token-file", "b"), "leave one of them out"),
        ((*here, "--budget", "4", *data, "--cert", str(ca)), "--cert and --key belong together"),
        ((*far, "--budget", "4", *data, "--ca", str(ca)), "ca.pem is no certificate in PEM form"),
        ((*here, "--budget", "4", *data, "--bundle", str(tmp_path)), "it has no client.pem"),
        ((*here, "--budget", "4", *data, "--retry-least", "9", "--retry-most", "3"), "at most --retry-most"),
        ((*here, "--budget", "4", *data), "not enrolled yet"),
        ((*here, "--budget", "4", "--data", "/nowhere", *data[2:]), "/nowhere: no such file or folder"),
    ):
        assert expected in mistake(capsys, *words)


def test_a_revoked_identity_is_exit_code_2(scene: Scene) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    scene.finish("--exit-when-done")
    scene.federation.identities.clear()
    log = scene.finish("--exit-when-done", code=2)
    last = log.splitlines()[-1]
    assert last.startswith(f"fedmpq client: {scene.server.address} refused this client:")
    assert f"delete {scene.folder / 'state' / 'identity.json'} and start with a new token" in last


def test_a_second_client_on_the_same_state_is_refused(scene: Scene) -> None:
    with scene.client():
        until(lambda: scene.federation.streams == 1)
        assert "give this one its own --state DIR" in scene.finish(code=2)


def test_an_open_identity_file_is_refused(scene: Scene) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    scene.finish("--exit-when-done")
    (scene.folder / "state" / "identity.json").chmod(0o644)
    assert "run chmod 600 " in scene.finish("--exit-when-done", code=2)


def test_the_manual_has_every_option() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    client_command.add_arguments(parser)
    manual = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
    options = [option for action in parser._actions for option in action.option_strings]
    assert len(options) > 20
    assert [option for option in options if f"`{option}" not in manual] == []


# Small and quiet


def status(process: int, entry: str) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition(f"\n{entry}:")[2].split()[0])


def wake_ups(process: int) -> int:
    tasks = Path(f"/proc/{process}/task").iterdir()
    entry = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)
    found = (entry.search((task / "status").read_text(encoding="ascii")) for task in tasks)
    return sum(int(match[1]) for match in found if match)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_waiting_client_hardly_wakes(scene: Scene) -> None:
    """No polling: what is left are gRPC's own timers, a few a second; starting may take the first spans."""
    with scene.client() as client:
        until(lambda: scene.federation.streams == 1)
        spans: list[int] = []
        while len(spans) < 6 and min(spans, default=1000) >= 2 * 15:
            before = wake_ups(client.pid)
            time.sleep(2)
            spans.append(wake_ups(client.pid) - before)
        assert min(spans) < 2 * 15, spans


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_the_whole_client_stays_small_while_it_trains_resnet20(tmp_path: Path) -> None:
    """Session, evaluation and two steps of batch 64 take a quarter of the batch's activations in fp32."""
    from tools import rounds

    plan = TrainingPlan(epochs=1, batch_size=64, pad=4, flip=True)
    rounds.make(tmp_path / "round.npz", "resnet20", (3, 32, 32), 128, plan)
    given = rounds.load(tmp_path / "round.npz")
    _save(tmp_path / "data.npz", images=given.data.images, labels=given.data.labels)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    server = RunningServer(FakeFederation())
    layers = {
        name: layer.unpack(given.graph.weight_shape(name)) for name, layer in given.assignment.layers.items()
    }
    work = Work(given.graph, layers, dict(given.assignment.side), plan, given.data.class_names)
    scene = Scene(tmp_path, server, given.data, work)
    scene.federation.on_stream = work.offer(scene.federation, evaluate=True)
    with scene.client("--threads", "2") as client:
        until(scene.delivered)
        peak = status(client.pid, "VmHWM") * 1024 / 1e6
    server.stop()
    before = peak_mb_after("import fedmpq.edge_client.client_process")
    assert peak - before < float_activations_mb(given.graph, 64) / 4
    print(f"peak {peak:.1f} MB, {before:.1f} MB before the round")


def test_the_client_loads_nothing_heavy() -> None:
    script = (
        "import sys; import fedmpq.edge_client.client_process; "
        "print([m for m in ('torch', 'PIL', 'rich', 'sqlalchemy', 'cryptography') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
