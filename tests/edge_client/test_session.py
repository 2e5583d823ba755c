"""A board's session against a server on a real socket that cuts, stalls, lies and restarts."""

from __future__ import annotations

import asyncio
import logging
import shutil
import stat
import threading
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import grpc
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.edge_client import session
from fedmpq.edge_client.board_data import HeldData
from fedmpq.edge_client.connection import Connection, RefusedError
from fedmpq.edge_client.limits import PROCESS_BYTES, Limits
from fedmpq.edge_client.round_work import THREAD_NAME
from fedmpq.edge_client.state_folder import StateError
from fedmpq.edge_client.transfer import Patience
from fedmpq.exchange.messages import Evaluation, pack_layers
from fedmpq.exchange.wire import (
    decode_calibration,
    decode_update,
    digest,
    encode_calibration,
    encode_model,
)
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system import memory
from fedmpq.training import local_calibration
from tests.edge_client.fake_federation import (
    RUN,
    TOKEN,
    cut_after,
    hang_after,
    refuse,
)
from tests.edge_client.scene import PLAN, Made, Scene, info, scene, until
from tools.tcp_proxy import Proxy

__all__ = ["info", "scene"]

ENDLESS = replace(PLAN, epochs=10**6)
CANCELLED, CANCELLED_CALIBRATION = (
    pb.Event(cancelled=pb.Cancelled(run_id=RUN, round=1, reason="the deadline passed", phase=phase))
    for phase in (pb.TRAINING, pb.CALIBRATION)
)
RUN_ENDED = pb.Event(run_ended=pb.RunEnded(run_id=RUN, state="finished"))


def training() -> bool:
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


# The plain way


def test_a_board_enrols_trains_and_delivers(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)

    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]
    assert scene.federation.names == ["board-1"]
    assert scene.federation.count("GetUpload") == 0
    hello = scene.federation.hellos[0]
    assert (hello.budget, hello.samples, hello.engine) == (4.0, 60, "native (test)")
    assert 0 < hello.free_bytes <= shutil.disk_usage(scene.folder).total
    assert stat.S_IMODE((scene.folder / "identity.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(scene.folder.stat().st_mode) == 0o700
    assert list((scene.folder / "downloads").iterdir()) == []


def test_the_next_start_needs_no_token_and_no_second_graph(scene: Scene) -> None:
    async def one_round(number: int, token: str) -> None:
        scene.federation.on_stream = scene.work.offer(scene.federation, number)
        async with scene.board(token=token):
            await until(lambda: len(scene.federation.complete(number)) == 1)

    scene.play(lambda: one_round(1, TOKEN))
    scene.play(lambda: one_round(2, ""))
    assert scene.federation.count("Enroll") == 1
    # A graph and two models.
    assert scene.federation.count("Download") == 3


def test_rounds_come_one_after_the_other_on_one_stream(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.streams == 1)
            for number in (1, 2, 3):
                for event in scene.work.offer(scene.federation, number):
                    scene.federation.send(event)
                await until(partial(scene.federation.complete, number))

    scene.play(scenario)
    for number in (1, 2, 3):
        assert scene.federation.complete(number) == [scene.work.update(scene.data, number)]
    assert len(scene.federation.hellos) == 1


def test_the_received_model_is_measured_when_asked(scene: Scene, make_data: Made) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, evaluate=True)
    test = make_data(70, seed=9)

    async def scenario() -> None:
        async with scene.board(data=HeldData(scene.data, test)):
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    work = scene.work
    guesses = logits(compile_program(work.graph, work.layers, work.side), test.images).argmax(axis=1)
    run_id, update = decode_update(work.graph, scene.federation.complete()[0])
    assert run_id == RUN
    assert update.evaluation == Evaluation(70, int((guesses == test.labels).sum()))
    expected = decode_update(work.graph, work.update(scene.data))[1]
    assert replace(update, evaluation=None, layers={}, side={}) == replace(expected, layers={}, side={})


def test_labels_follow_the_names_of_the_classes(scene: Scene) -> None:
    """The board's folders are c, b, a (say, of another language); the model's labels are a, b, c."""
    scene.federation.on_stream = scene.work.offer(scene.federation)
    turned = Dataset(scene.data.images, 2 - scene.data.labels, ("c", "b", "a"))

    async def scenario() -> None:
        async with scene.board(data=HeldData(turned, turned)):
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_images_are_brought_to_the_models_size(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    large = Dataset(scene.data.images.repeat(2, axis=1).repeat(2, axis=2), scene.data.labels, ("a", "b", "c"))

    async def scenario() -> None:
        async with scene.board(data=HeldData(large, large)):
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_the_end_of_the_run_ends_the_client_that_was_told_so(scene: Scene) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    scene.play(lambda: scene.run(exit_when_done=True))

    async def scenario() -> None:
        async with scene.board() as patient:
            await until(lambda: scene.federation.streams == 1)
            await asyncio.sleep(0.2)
            assert not patient.done()

    scene.play(scenario)


def test_the_end_of_the_run_is_confirmed(scene: Scene) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    scene.play(lambda: scene.run(exit_when_done=True))
    assert scene.federation.hellos[0].confirms
    assert scene.federation.confirmed == [RUN]


@pytest.mark.parametrize("is_old", [True, False])
def test_a_confirmation_that_fails_keeps_no_client_from_its_end(scene: Scene, is_old: bool) -> None:
    scene.federation.on_stream = [RUN_ENDED]
    scene.federation.is_old = is_old
    scene.federation.faults.confirm = [refuse(grpc.StatusCode.UNAVAILABLE, "not now")]
    scene.play(lambda: scene.run(exit_when_done=True))
    assert scene.federation.count("Confirm") == 1
    assert scene.federation.confirmed == []


def test_a_stream_that_is_renewed_while_it_confirms_keeps_no_client_from_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have heard it and tells of it no more."""
    scene.federation.on_stream = [RUN_ENDED]
    release = threading.Event()
    hang = hang_after(0, release)
    scene.federation.faults.confirm = [lambda context: hang(0, context)]
    confirm = Connection.confirm

    async def confirm_and_renew(self: Connection, run_id: str) -> None:
        scene.federation.on_stream = []
        asyncio.get_running_loop().call_later(0.2, self.renew)
        await confirm(self, run_id)

    monkeypatch.setattr(Connection, "confirm", confirm_and_renew)
    try:
        scene.play(lambda: asyncio.wait_for(scene.run(exit_when_done=True), 30.0))
    finally:
        release.set()
    assert scene.federation.count("Confirm") == 1


# Broken transfers


def test_a_download_goes_on_at_the_byte_where_it_broke(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    # The graph breaks twice, at once and later; the model once.
    scene.federation.faults.download = [cut_after(600), cut_after(0), cut_after(10**9), cut_after(300)]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.offsets("Download") == [0, 600, 600, 0, 300]
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_a_download_goes_on_after_a_new_start(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    release = threading.Event()
    scene.federation.faults.download = [cut_after(10**9), hang_after(300, release)]

    async def killed() -> None:
        async with scene.board():
            part = scene.folder / "downloads"
            await until(lambda: part.exists() and any(p.stat().st_size == 300 for p in part.glob("*.part")))

    async def again() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts))

    try:
        scene.play(killed)
    finally:
        release.set()
    scene.play(again)
    assert scene.federation.offsets("Download") == [0, 0, 300]
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_damaged_payloads_begin_anew(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    work = scene.work
    scene.federation.on_stream = work.offer(scene.federation)
    graph = work.graph.to_bytes()
    scene.federation.faults.damage = [b"?" + graph[1:], graph + b"more", graph]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.offsets("Download") == [0, 0, 0, 0]
    assert "the hash is another" in caplog.text
    assert f"more than {len(graph)} bytes came" in caplog.text
    assert scene.federation.complete() == [work.update(scene.data)]


def test_an_upload_goes_on_at_the_byte_where_it_broke(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.upload = [cut_after(200), cut_after(300)]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.offsets("Upload") == [0, 200, 300]
    assert scene.federation.count("GetUpload") == 2
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_a_lost_receipt_is_asked_for_and_nothing_sent_again(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.receipt = [refuse(grpc.StatusCode.UNAVAILABLE, "cut")]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("GetUpload") == 1 and not scene.outbox)

    scene.play(scenario)
    assert scene.federation.count("Upload") == 1


def test_stalled_transfers_go_on_over_a_new_connection(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    release = threading.Event()
    scene.federation.faults.download = [hang_after(300, release)]
    scene.federation.faults.upload = [hang_after(300, release)]

    async def scenario() -> None:
        async with scene.board(patience=Patience(0.5, 0.5)):
            await until(lambda: bool(scene.federation.receipts))

    try:
        scene.play(scenario)
    finally:
        release.set()
    assert "the download did not move for 0.5 s" in caplog.text
    assert "the receipt did not move for 0.5 s" in caplog.text
    assert scene.federation.offsets("Download")[:2] == [0, 300]
    assert scene.federation.offsets("Upload") == [0, 300]
    assert len(scene.federation.hellos) == 3
    assert scene.federation.complete() == [scene.work.update(scene.data)]


# Broken connections


def test_a_server_that_comes_late_is_waited_for(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.server.stop()

    async def scenario() -> None:
        async with scene.board():
            await asyncio.sleep(0.5)
            scene.server.start()
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)


def test_a_restart_while_waiting_is_only_a_pause(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.board():
            for _ in range(3):
                await until(lambda: scene.federation.streams == 1)
                await asyncio.to_thread(scene.server.stop)
                await asyncio.sleep(0.1)
                scene.server.start()
            await until(lambda: scene.federation.streams == 1)
            for event in scene.work.offer(scene.federation):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.count("Enroll") == 1


def test_training_goes_on_while_the_server_is_away(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    work = replace(scene.work, plan=replace(PLAN, epochs=60))
    scene.federation.on_stream = work.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: "epoch 1 of 60" in caplog.text)
            await asyncio.to_thread(scene.server.stop)
            await asyncio.sleep(0.2)
            scene.server.start()
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert caplog.text.count("epoch 1 of 60") == 1
    assert scene.federation.complete() == [work.update(scene.data)]


def test_cut_connections_during_a_round(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    proxy = Proxy(scene.server.port)

    def cut(_: int, __: grpc.ServicerContext) -> None:
        proxy.cut()

    scene.federation.faults.download = [cut, cut_after(10**9), cut]
    scene.federation.faults.upload = [cut]
    scene.federation.faults.receipt = [lambda _: proxy.cut()]

    async def scenario() -> None:
        async with scene.board(address=proxy.address):
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)

    with proxy:
        scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_a_silent_connection_is_noticed_and_replaced(scene: Scene) -> None:
    proxy = Proxy(scene.server.port)

    async def scenario() -> None:
        async with scene.board(address=proxy.address, keepalive=0.5, patience=Patience(1.0, 1.0)):
            await until(lambda: scene.federation.streams == 1)
            proxy.stall(True)
            accepted = proxy.accepted
            await until(lambda: proxy.accepted > accepted)
            proxy.stall(False)
            await until(lambda: len(scene.federation.hellos) >= 2)

    with proxy:
        scene.play(scenario)


# What the server does not want


def test_a_rejected_update_is_dropped_and_the_next_round_done(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    reason = "layer 'stem' has 5 bits; 4 were dealt"
    scene.federation.faults.receipt = [refuse(grpc.StatusCode.INVALID_ARGUMENT, reason)]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: "rejected" in caplog.text)
            await until(lambda: not scene.outbox)
            for event in scene.work.offer(scene.federation) + scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert f"round 1: the server rejected its update: {reason}" in caplog.text
    assert scene.federation.count("Upload") == 2


def test_an_update_that_is_too_late_is_dropped(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    fault = refuse(grpc.StatusCode.FAILED_PRECONDITION, "round 1 is over")
    scene.federation.faults.upload = [lambda _, context: fault(context)] * 5

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: "came too late: round 1 is over" in caplog.text and not scene.outbox)

    scene.play(scenario)


@pytest.mark.parametrize("moment", ["listening", "uploading"])
def test_a_revoked_identity_ends_the_client_with_the_fix(scene: Scene, moment: str) -> None:
    async def scenario() -> None:
        async with scene.board() as task:
            await until(lambda: scene.federation.streams == 1)
            if moment == "listening":
                scene.federation.identities.clear()
                await asyncio.to_thread(scene.server.stop)
                scene.server.start()
            else:
                # While it has the model, the graph being the first download: the upload is the next call.
                revoke = scene.federation.identities.clear
                scene.federation.faults.download = [lambda *_: None, lambda *_: revoke()]
                for event in scene.work.offer(scene.federation):
                    scene.federation.send(event)
            await until(task.done)

    with pytest.raises(RefusedError) as caught:
        scene.play(scenario)
    assert "it was revoked" in str(caught.value)
    assert f"delete {scene.folder / 'identity.json'} and start with a new token" in str(caught.value)


def test_a_wrong_token_ends_the_client(scene: Scene) -> None:
    with pytest.raises(RefusedError, match="did not enrol 'board-1': no such token; make one"):
        scene.play(lambda: scene.run(token="fmq_wrong"))
    with pytest.raises(RefusedError, match=r"not enrolled yet.*--token-file"):
        scene.play(lambda: scene.run(token=""))


def test_a_board_the_server_cannot_use_ends_with_its_words(scene: Scene) -> None:
    reason = "a client trains on 2 samples or more, not on 1"
    scene.federation.faults.listen = [refuse(grpc.StatusCode.INVALID_ARGUMENT, reason)]
    with pytest.raises(RefusedError, match=f"refused this client: {reason}"):
        scene.play(scene.run)


def test_a_full_server_is_asked_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    full = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "10 clients are connected")
    scene.federation.faults.listen = [full, full]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.streams == 1)

    scene.play(scenario)
    assert caplog.text.count("(10 clients are connected); trying again in") == 2


def test_a_payload_that_is_gone_leaves_the_round(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.payloads.clear()

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: "left, the server said: no such payload" in caplog.text)
            for event in scene.work.offer(scene.federation):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bit_widths": b"\4\4"}, "2 bit-widths are dealt to the model's 4 layers"),
        ({"payload_bytes": 10**9}, "its model is 1000000000 bytes long, at most"),
        ({"run_id": "unheard-of"}, "its run 'unheard-of' was not described"),
    ],
)
def test_an_assignment_that_cannot_be_is_told_and_left(
    scene: Scene, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, **changes)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: f"round 1: cannot be done here: {reason}" in caplog.text)
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)


def test_a_model_of_another_graph_is_told_and_left(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    work = scene.work
    broken = encode_model(work.graph, pack_layers(work.layers), work.side)[34:]
    changes: dict[str, Any] = {"payload": digest(broken), "payload_bytes": len(broken)}
    scene.federation.on_stream = work.offer(scene.federation, **changes)
    scene.federation.payloads[digest(broken)] = broken

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: "cannot be done here: the payload is of graph none" in caplog.text)

    scene.play(scenario)


# Called off


@pytest.mark.parametrize("event", [CANCELLED, RUN_ENDED])
def test_training_stops_between_batches_when_called_off(scene: Scene, event: pb.Event) -> None:
    endless = replace(scene.work, plan=ENDLESS)
    scene.federation.on_stream = endless.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(training)
            scene.federation.send(event)
            await until(lambda: not training(), seconds=2)
            for again in scene.work.offer(scene.federation, 2):
                scene.federation.send(again)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert scene.federation.complete(1) == []


def test_a_newer_round_takes_the_place_of_an_older_one(scene: Scene) -> None:
    endless = replace(scene.work, plan=ENDLESS)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.streams == 1)
            for event in endless.offer(scene.federation):
                scene.federation.send(event)
            await until(training)
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)


def test_a_stopped_session_leaves_no_thread(scene: Scene) -> None:
    scene.federation.on_stream = replace(scene.work, plan=ENDLESS).offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(training)

    scene.play(scenario)
    assert not training()


# Calibration


@pytest.fixture
def endless_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always another batch to measure."""
    monkeypatch.setattr(
        local_calibration, "calibration_batches", lambda _, size, images: repeat(images[:size])
    )


def test_a_board_measures_statistics_and_delivers_them(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, phase=pb.CALIBRATION)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)

    scene.play(scenario)
    assert scene.federation.complete() == []
    delivered = scene.federation.complete(phase=pb.CALIBRATION)
    assert delivered == [scene.work.calibration(scene.data)]
    assert scene.federation.phases == [("Upload", pb.CALIBRATION)]
    assert scene.federation.count("Download") == 2
    assert list((scene.folder / "downloads").iterdir()) == []
    run_id, found = decode_calibration(scene.work.graph, delivered[0])
    assert (run_id, found.round, found.client, found.samples) == (RUN, 1, 7, 60)
    assert f"round 1: calibration of {len(delivered[0])} bytes delivered" in caplog.text
    assert "epoch" not in caplog.text


def test_a_board_that_is_asked_to_evaluates_with_the_statistics_it_measured(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, phase=pb.CALIBRATION, evaluate=True)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.complete(phase=pb.CALIBRATION)))

    scene.play(scenario)
    graph = scene.work.graph
    (delivered,) = scene.federation.complete(phase=pb.CALIBRATION)
    _, found = decode_calibration(graph, delivered)
    assert encode_calibration(graph, RUN, replace(found, evaluation=None)) == scene.work.calibration(
        scene.data
    )
    deployed = DeployedModel(graph, scene.work.layers, {**scene.work.side, **found.statistics})
    assert found.evaluation is not None
    assert found.evaluation.samples == len(scene.data)
    share = found.evaluation.correct / found.evaluation.samples
    assert share == deployed.accuracy(scene.data.images, scene.data.labels)


def test_a_calibration_follows_the_training_of_its_round(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Even with the same model the two are different work; said again, each is asked for by its phase."""
    phases = (pb.TRAINING, pb.CALIBRATION)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.streams == 1)
            for phase in phases:
                for event in scene.work.offer(scene.federation, phase=phase):
                    scene.federation.send(event)
                await until(lambda p=phase: scene.federation.complete(phase=p) and not scene.outbox)  # type: ignore[misc]
            for event in scene.work.offer(scene.federation, phase=pb.CALIBRATION):
                scene.federation.send(event)
            await until(lambda: scene.federation.count("GetUpload") == 1)
            await asyncio.sleep(0.2)

    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]
    assert scene.federation.complete(phase=pb.CALIBRATION) == [scene.work.calibration(scene.data)]
    asked = [("Upload", pb.TRAINING), ("Upload", pb.CALIBRATION), ("GetUpload", pb.CALIBRATION)]
    assert scene.federation.phases == asked
    assert caplog.text.count("round 1 of 3, statistics: small") == 1


@pytest.mark.parametrize("repeated", [True, False])
def test_statistics_that_wait_are_delivered_and_not_measured_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, phase=pb.CALIBRATION)
    scene.federation.faults.upload = [cut_after(0)] * 1000

    async def killed() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("Upload") >= 1 and scene.keeps_an_answer)

    async def again() -> None:
        async with scene.board(token=""):
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)

    def refuse_to_measure(*_: object) -> bytes:
        raise AssertionError("it measures again")

    scene.play(killed)
    monkeypatch.setattr(session, "make_calibration", refuse_to_measure)
    scene.federation.faults.upload = []
    scene.federation.phases.clear()
    if not repeated:
        scene.federation.on_stream = []
    scene.play(again)
    assert scene.federation.phases[:2] == [("GetUpload", pb.CALIBRATION), ("Upload", pb.CALIBRATION)]
    assert scene.federation.complete(phase=pb.CALIBRATION) == [scene.work.calibration(scene.data)]


def test_a_waiting_update_gives_way_to_the_calibration_of_its_round(scene: Scene) -> None:
    """The server has closed the training when it opens the calibration."""
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.upload = [cut_after(0)] * 1000

    async def killed() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("Upload") >= 1 and scene.keeps_an_answer)

    async def again() -> None:
        async with scene.board():
            await until(lambda: scene.federation.complete(phase=pb.CALIBRATION) and not scene.outbox)

    scene.play(killed)
    scene.federation.faults.upload = [cut_after(0)]
    scene.federation.on_stream = scene.work.offer(scene.federation, phase=pb.CALIBRATION)
    scene.play(again)
    assert scene.federation.complete() == []
    assert scene.federation.complete(phase=pb.CALIBRATION) == [scene.work.calibration(scene.data)]


@pytest.mark.usefixtures("endless_calibration")
@pytest.mark.parametrize(
    ("phase", "own", "other"),
    [
        (pb.TRAINING, CANCELLED, CANCELLED_CALIBRATION),
        (pb.CALIBRATION, CANCELLED_CALIBRATION, CANCELLED),
    ],
)
def test_only_a_cancellation_of_its_own_phase_stops_the_work(
    scene: Scene, caplog: pytest.LogCaptureFixture, phase: pb.Phase, own: pb.Event, other: pb.Event
) -> None:
    run, assignment = replace(scene.work, plan=ENDLESS).offer(scene.federation, phase=phase)
    scene.federation.on_stream = [run, assignment]
    renamed = pb.Event(run=run.run)
    renamed.run.name = "renamed"

    async def scenario() -> None:
        async with scene.board():
            await until(training)
            scene.federation.send(other)
            # Events are heard in order: once this one was, the one before it has done what it does.
            scene.federation.send(renamed)
            await until(lambda: "(renamed)" in caplog.text)
            assert training()
            assert "goes on without this client" not in caplog.text
            scene.federation.send(own)
            await until(lambda: not training(), seconds=2)
            assert "round 1: goes on without this client: the deadline passed" in caplog.text
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert scene.federation.complete(1, phase) == []


@pytest.mark.usefixtures("endless_calibration")
def test_the_next_round_takes_the_place_of_a_calibration(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation, phase=pb.CALIBRATION)

    async def scenario() -> None:
        async with scene.board():
            await until(training)
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert scene.federation.complete(phase=pb.CALIBRATION) == []


def test_a_phase_of_a_newer_version_is_told_and_left(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It does not even stop the work at hand."""
    scene.federation.on_stream = replace(scene.work, plan=ENDLESS).offer(scene.federation)

    def errors() -> list[str]:
        own = [record for record in caplog.records if record.name == "fedmpq.client"]
        return [record.getMessage() for record in own if record.levelno == logging.ERROR]

    async def scenario() -> None:
        async with scene.board():
            await until(training)
            for event in scene.work.offer(scene.federation, phase=7):
                scene.federation.send(event)
            await until(errors)
            assert training()
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert errors() == ["round 1: cannot be done here: phase 7 is none of this version's; upgrade fedmpq"]
    assert {phase for _, phase in scene.federation.phases} == {pb.TRAINING}


# The same round again


def test_an_assignment_said_twice_is_trained_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    offer = scene.work.offer(scene.federation)
    scene.federation.on_stream = [*offer, *offer]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)
            for event in offer:
                scene.federation.send(event)
            await until(lambda: scene.federation.count("GetUpload") == 1)
            await asyncio.sleep(0.2)

    scene.play(scenario)
    assert caplog.text.count("epoch 1 of 2") == 1
    assert scene.federation.count("Upload") == 1


def test_a_server_that_lost_the_update_gets_it_again(scene: Scene) -> None:
    offer = scene.work.offer(scene.federation)
    scene.federation.on_stream = offer

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)
            scene.federation.receipts.clear()
            scene.federation.uploads.clear()
            for event in offer:
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]


@pytest.mark.parametrize("repeated", [True, False])
def test_an_update_that_waits_is_delivered_and_not_trained_again(
    scene: Scene, caplog: pytest.LogCaptureFixture, repeated: bool
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.upload = [cut_after(300)] + [cut_after(0)] * 1000

    async def killed() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("Upload") >= 2 and scene.keeps_an_answer)

    async def again() -> None:
        async with scene.board(token=""):
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)

    scene.play(killed)
    caplog.clear()
    scene.federation.faults.upload = []
    if not repeated:
        scene.federation.on_stream = []
    before = len(scene.federation.calls)
    scene.play(again)
    # The stream's own calls run beside the delivery and may fall between the two.
    delivery = [call for call in scene.federation.calls[before:] if call[0] in ("GetUpload", "Upload")]
    assert delivery[:2] == [("GetUpload", 0), ("Upload", 300)]
    assert "epoch" not in caplog.text
    assert scene.federation.complete() == [scene.work.update(scene.data)]


def test_a_waiting_update_of_an_older_round_is_dropped(scene: Scene) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.federation.faults.upload = [cut_after(0)] * 1000

    async def killed() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("Upload") >= 1 and scene.keeps_an_answer)

    async def again() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.complete(2)) and not scene.outbox)

    scene.play(killed)
    scene.federation.faults.upload = [cut_after(0)]
    scene.federation.on_stream = scene.work.offer(scene.federation, 2)
    scene.play(again)
    assert scene.federation.complete(1) == []
    assert scene.federation.complete(2) == [scene.work.update(scene.data, 2)]


def test_two_clients_cannot_share_a_state_folder(scene: Scene) -> None:
    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.streams == 1)
            with pytest.raises(StateError, match="its own --state DIR"):
                await scene.run()

    scene.play(scenario)


# What a board gives


def given_up(caplog: pytest.LogCaptureFixture) -> str:
    return next((line for line in caplog.messages if "cannot be done here" in line), "")


def test_a_round_that_needs_more_memory_than_is_given_is_refused_before_its_model_is_fetched(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_given", PROCESS_BYTES + 10_000)
    scene.federation.on_stream = scene.work.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: given_up(caplog))

    scene.play(scenario)
    assert "of memory here" in given_up(caplog)
    assert "start the board with a higher --max-memory" in given_up(caplog)
    # The graph alone.
    assert scene.federation.count("Download") == 1


def test_a_board_goes_on_after_a_round_that_it_refused(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = replace(scene.work, plan=replace(PLAN, pad=4096))
    scene.federation.on_stream = greedy.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: given_up(caplog))
            for event in scene.work.offer(scene.federation, 2):
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.receipts))

    monkeypatch.setattr(memory, "_given", PROCESS_BYTES + (256 << 20))
    scene.play(scenario)
    assert scene.federation.complete(2) == [scene.work.update(scene.data, 2)]


@pytest.mark.parametrize("name", ["epochs", "batch_size", "pad"])
def test_counts_of_no_sense_are_refused(scene: Scene, caplog: pytest.LogCaptureFixture, name: str) -> None:
    events = scene.work.offer(scene.federation)
    setattr(events[-1].assignment.plan, name, 2**32 - 1)
    scene.federation.on_stream = events

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: given_up(caplog))

    scene.play(scenario)
    assert f"{name} = 4294967295 is too large" in given_up(caplog)


def test_a_training_that_takes_longer_than_is_given_is_given_up(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    endless = replace(scene.work, plan=ENDLESS)
    scene.federation.on_stream = endless.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board(limits=Limits(seconds=2.0)):
            await until(lambda: given_up(caplog))

    scene.play(scenario)
    assert "and this board gives a round 2: lower epochs" in given_up(caplog)
    assert not training()


def test_what_no_processor_does_in_the_time_is_refused_at_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    endless = replace(scene.work, plan=ENDLESS)
    scene.federation.on_stream = endless.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board(limits=Limits(seconds=0.01)):
            await until(lambda: given_up(caplog))

    scene.play(scenario)
    assert "on any processor of 1 cores" in given_up(caplog)
    assert scene.federation.count("Download") == 1
