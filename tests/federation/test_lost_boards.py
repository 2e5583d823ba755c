"""Boards that are lost in the middle of a round: the run goes on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedmpq.cli.main import main
from tests.federation.federation import Federation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "revoked"),
    [({"away_seconds": 2}, True), ({"away_seconds": 2, "deadline_seconds": 4}, False)],
    ids=["revoked", "away"],
)
def test_a_run_goes_on_without_a_board_that_was_lost(
    tmp_path: Path, settings: dict[str, Any], revoked: bool
) -> None:
    """With a quorum of all and no spare board."""
    with Federation(tmp_path, [2, 4, 8], {"rounds": 2, **settings}) as federation:
        federation.start_server()
        federation.start_boards()
        lost = federation.boards.pop(2)
        lost.wait_for("round 1 of 2, training")
        lost.kill()
        if revoked:
            assert main(["server", "revoke", "board-2", "--state", str(federation.state)]) == 0
        federation.finish()
        history = federation.stored().history
        assert [row["clients"] for row in history] == [2, 2]
        assert [row["cut"] for row in history] == [1, 0]
