"""Rounds that a board cannot do, and full disks: the server hears of it, and the client stays."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.edge_client.board_data import BoardData
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.proto import federation_pb2 as pb
from tests.edge_client.fake_federation import RUN
from tests.edge_client.scene import Scene, info, scene, until
from tests.full_disk import fill, small_disk

__all__ = ["info", "scene", "small_disk"]


@pytest.mark.parametrize("is_old", [False, True])
def test_data_that_do_not_fit_are_told_and_the_client_waits(
    scene: Scene, caplog: pytest.LogCaptureFixture, is_old: bool
) -> None:
    """Of an unknown class, then of another colour mode. An older server does not know the call."""
    scene.federation.is_old = is_old
    scene.federation.on_stream = scene.work.offer(scene.federation)
    zebras = Dataset(scene.data.images, scene.data.labels, ("a", "zebra", "c"))
    grey = Dataset(np.ascontiguousarray(scene.data.images[..., :1]), scene.data.labels, ("a", "b", "c"))
    reasons = ["class 'zebra' is none of the model's 3 classes", "1 channels, the model takes 3"]
    for data, reason in zip((zebras, grey), reasons, strict=True):
        calls = scene.federation.count("Decline")
        scene.play(partial(play_until_declined, scene, BoardData(data, data), calls + 1))
        assert reason in caplog.text
        if not is_old:
            told = scene.federation.declined[-1]
            assert reason in told.reason
            assert (told.run_id, told.round, told.phase) == (RUN, 1, pb.TRAINING)


async def play_until_declined(scene: Scene, data: BoardData, calls: int) -> None:
    async with scene.board(data=data) as task:
        await until(lambda: scene.federation.count("Decline") == calls)
        # A later assignment of the same round is refused again, without another try.
        for event in scene.federation.on_stream:
            scene.federation.send(event)
        await until(lambda: scene.federation.count("Decline") == calls + 1)
        assert not task.done()


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
