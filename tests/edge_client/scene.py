"""A board's session and the server that the client's tests connect it to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.board_data import BoardSource, HeldData
from fedmpq.edge_client.channel import Endpoint
from fedmpq.edge_client.limits import Limits
from fedmpq.edge_client.session import Board, Session, Settings
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.edge_client.transfer import Patience
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.training.engine import make_engine
from tests.edge_client.fake_federation import TOKEN, FakeFederation, RunningServer, Work

Made = Callable[..., Any]
PLAN = TrainingPlan(epochs=2, batch_size=8, update="carried", code_learning_rate=0.02)


@dataclass
class Scene:
    """A server, and a board that tests connect to it."""

    server: RunningServer
    folder: Path
    data: Dataset
    work: Work

    @property
    def federation(self) -> FakeFederation:
        return self.server.federation

    @property
    def outbox(self) -> list[Path]:
        return list((self.folder / "outbox").iterdir())

    @property
    def keeps_an_answer(self) -> bool:
        """Whether one is durable; its delivery may have begun before."""
        return (self.folder / "outbox" / "pending.json").exists()

    def play(self, scenario: Callable[[], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(scenario(), 180))

    @asynccontextmanager
    async def board(self, **changes: Any) -> Any:
        """A session under way; what ended it early is raised at the end."""
        task = asyncio.create_task(self.run(**changes))
        try:
            yield task
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def run(
        self,
        *,
        address: str = "",
        data: BoardSource | None = None,
        patience: Patience = Patience(5.0, 5.0),  # noqa: B008
        keepalive: float = 60.0,
        token: str = TOKEN,
        exit_when_done: bool = False,
        limits: Limits = Limits(),  # noqa: B008
    ) -> None:
        endpoint = Endpoint(address or self.server.address, None, keepalive, keepalive)
        board_data = data or HeldData(self.data)
        board = Board("board-1", 4.0, board_data, make_engine("native", 1), "native (test)", 1, limits)
        settings = Settings(token, Backoff(0.05, 0.2), patience, exit_when_done)
        with closing(StateFolder(self.folder)) as state:
            await Session(endpoint, state, board, settings).run()


@pytest.fixture
def scene(tmp_path: Path, make_model: Made, make_data: Made) -> Iterator[Scene]:
    server = RunningServer(FakeFederation())
    model = make_model(bits=4)
    yield Scene(server, tmp_path / "state", make_data(60), Work(model.graph, model.layers, model.side, PLAN))
    server.stop()


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedmpq.client")


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)
