"""Rounds that a board cannot do, and full disks: the server hears of it, and the client stays."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.edge_client.board_data import HeldData, NamedData
from fedmpq.edge_client.limits import PROCESS_BYTES
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.exchange.wire import plan_to_message
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system import memory
from tests.edge_client.fake_federation import RUN
from tests.edge_client.scene import PLAN, Scene, info, scene, until
from tests.full_disk import fill, small_disk

__all__ = ["info", "scene", "small_disk"]


@pytest.mark.parametrize("is_old", [False, True])
def test_data_that_do_not_fit_are_told_and_the_client_waits(
    scene: Scene, caplog: pytest.LogCaptureFixture, is_old: bool
) -> None:
    """Of an unknown class, then of channels that no image has; as soon as the run is described, and again
    with its work. An older server does not know the call."""
    scene.federation.is_old = is_old
    scene.federation.on_stream = scene.work.offer(scene.federation)
    zebras = Dataset(scene.data.images, scene.data.labels, ("a", "zebra", "c"))
    odd = Dataset(np.ascontiguousarray(scene.data.images[..., :2]), scene.data.labels, ("a", "b", "c"))
    reasons = ["class 'zebra' is none of the model's 3 classes", "the samples are (6, 5, 2)"]
    for data, reason in zip((zebras, odd), reasons, strict=True):
        scene.federation.declined.clear()
        scene.play(partial(play_until_declined, scene, HeldData(data)))
        assert reason in caplog.text
        if not is_old:
            assert all(reason in told.reason for told in scene.federation.declined)
            told = {(told.run_id, told.round, told.phase) for told in scene.federation.declined}
            assert told == {("", 0, pb.TRAINING), (RUN, 1, pb.TRAINING)}


async def play_until_declined(scene: Scene, data: HeldData) -> None:
    calls = scene.federation.count("Decline")
    async with scene.board(data=data) as task:
        await until(lambda: scene.federation.count("Decline") == calls + 2)
        # A later assignment of the same round is refused again, without another try. One that comes while the
        # answer to the first refusal is still on its way is passed over, as the refusal holds for it too.
        while scene.federation.count("Decline") < calls + 4:
            for event in scene.federation.on_stream:
                scene.federation.send(event)
            await asyncio.sleep(0.5)
        assert not task.done()


def test_a_board_says_that_it_is_ready_and_of_how_many_samples(scene: Scene) -> None:
    """When the run is described, and on every stream anew."""
    description = scene.work.offer(scene.federation)[0]
    scene.federation.on_stream = [description]

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: scene.federation.count("Ready") == 1)
            scene.federation.send(description)
            await until(lambda: scene.federation.count("Ready") == 2)

    scene.play(scenario)
    assert scene.federation.ready == 2 * [pb.ReadyRequest(run_id=RUN, samples=len(scene.data))]
    assert scene.federation.hellos[0].answers
    assert scene.federation.count("Download") == 1, "the graph alone, and once"


def test_a_board_that_is_too_small_says_so_before_it_is_chosen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = scene.work.offer(scene.federation)[0]
    description.run.plan.CopyFrom(plan_to_message(PLAN))
    scene.federation.on_stream = [description]
    monkeypatch.setattr(memory, "_given", PROCESS_BYTES + 10_000)

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: bool(scene.federation.declined))

    scene.play(scenario)
    assert "start the board with a higher --max-memory" in scene.federation.declined[0].reason
    assert scene.federation.declined[0].run_id == ""
    assert not scene.federation.ready


def test_a_full_disk_is_told_waited_for_and_tried_again(
    scene: Scene, caplog: pytest.LogCaptureFixture, small_disk: Path
) -> None:
    """A file system of its own with no space left: for the model at first, then for its update."""
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.folder = small_disk / "state"
    filler = small_disk / "filler"

    async def scenario() -> None:
        async with scene.board() as task:
            await until(lambda: bool(scene.federation.declined))
            assert f"no space is left in {scene.folder}" in scene.federation.declined[0].reason
            await until(lambda: "trying again in" in caplog.text)
            assert not task.done()
            streams = len(scene.federation.hellos)
            filler.unlink()
            await until(lambda: bool(scene.federation.receipts) and not scene.outbox)
            assert len(scene.federation.hellos) == streams + 1, "the new stream says that it can again"

    scene.play(partial(run_enrolled, scene))
    fill(filler)
    scene.play(scenario)
    assert scene.federation.complete() == [scene.work.update(scene.data)]


async def run_enrolled(scene: Scene) -> None:
    """Until the board has its identity and nothing else."""
    offered, scene.federation.on_stream = scene.federation.on_stream, []
    async with scene.board():
        await until(lambda: scene.federation.streams == 1)
    scene.federation.on_stream = offered


def test_a_disk_that_is_full_from_the_start_is_waited_for(
    scene: Scene, caplog: pytest.LogCaptureFixture, small_disk: Path
) -> None:
    scene.federation.on_stream = scene.work.offer(scene.federation)
    scene.folder = small_disk / "state"
    with closing(StateFolder(scene.folder)):
        fill(small_disk / "filler")

    async def scenario() -> None:
        async with scene.board():
            await until(lambda: f"no space is left in {scene.folder}" in caplog.text)
            (small_disk / "filler").unlink()
            await until(lambda: bool(scene.federation.receipts))

    scene.play(scenario)


@pytest.mark.parametrize("is_old", [False, True])
def test_new_files_are_in_the_next_round(scene: Scene, tmp_path: Path, is_old: bool) -> None:
    """The server hears of the number before the update comes; an old one by a new stream."""
    scene.federation.is_old = is_old
    whole, few = scene.data, scene.data.subset(range(40))
    path = tmp_path / "data.npz"
    save(path, few)
    scene.federation.on_stream = scene.work.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board(data=NamedData(str(path))):
            await until(lambda: bool(scene.federation.complete(1)) and not scene.outbox)
            save(path, whole)
            scene.federation.on_stream = scene.work.offer(scene.federation, 2)
            for event in scene.federation.on_stream:
                scene.federation.send(event)
            await until(lambda: bool(scene.federation.complete(2)))

    scene.play(scenario)
    assert scene.federation.complete(1) == [scene.work.update(few)]
    assert scene.federation.complete(2) == [scene.work.update(whole, 2)]
    if is_old:
        assert scene.federation.hellos[-1].samples == len(whole)
    else:
        assert {each.samples for each in scene.federation.ready} == {len(few), len(whole)}


def save(path: Path, data: Dataset) -> None:
    np.savez(path, images=data.images, labels=data.labels, class_names=np.array(data.class_names))
