"""Front-ends beside a leader: boards meet another one at every connection, whatever breaks, and the result is
the same to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedmpq.server.leading import DEPOSED
from tests.databases import running_postgres
from tests.federation.federation import Federation, assert_same
from tests.federation.fronts import Cable, Fronts, socket_of, through
from tests.s3 import running_s3
from tools.programs import Program, wait_for_port, wait_until

KILLS = int(os.environ.get("FEDMPQ_TEST_KILLS", "2"))
"""Of leaders and front-ends in one run; more take some seconds each."""
ROUNDS = int(os.environ.get("FEDMPQ_TEST_ROUNDS", 6 * KILLS))
"""The faster the machine, the more go by between two kills: five on a machine that is not very busy."""
CUT_SECONDS = 1.5
MOST_SECONDS = 2.0
LEADS = "leading front-ends"
UNFORESEEN = ("a call failed", "a look at", "the run cannot go on", "a merge failed")
"""Libraries below may tell of a connection that broke; of these none may be in a log."""


@pytest.fixture
def database() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url.render_as_string(hide_password=False)


@pytest.mark.slow
def test_whatever_is_killed_or_cut_off_the_model_is_the_same(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaders and front-ends are killed, the database and the payloads are away for a while, and a leader
    that was paused until another led is refused when it wakes up."""
    random = np.random.default_rng(KILLS)
    with (
        running_s3(tmp_path) as s3,
        Cable(socket_of(database)) as to_database,
        Cable(s3.port) as to_s3,
        Federation(tmp_path, (2, 8), {"rounds": ROUNDS}, through(to_database, database)) as federation,
    ):
        for name, value in {**s3.environment, "AWS_ENDPOINT_URL": f"http://{to_s3.address}"}.items():
            monkeypatch.setenv(name, value)
        with Fronts(federation, s3.url("payloads")) as fronts:
            second = fronts.standby()
            fronts.start_boards()
            pause_until_deposed(fronts.leader, second)
            for cable in (to_database, to_s3):
                cable.unplug()
                time.sleep(CUT_SECONDS)
                cable.plug()
            killed = 0
            for number in range(KILLS):
                time.sleep(random.uniform(0, MOST_SECONDS))
                fronts.balancer.cut()
                # The front-ends and who leads, then as chance has it.
                killed += kill(number if number < 3 else int(random.choice((0, 1, 2, 2))), fronts, second)
            assert killed == KILLS, (
                f"the run was over after {killed} of {KILLS} kills: {ROUNDS} rounds are too few for this "
                "machine; set FEDMPQ_TEST_ROUNDS to more"
            )
            assert_same(fronts.finish(second), federation.simulated())
            for words in UNFORESEEN:
                assert words not in fronts.log() + second.text()


def kill(number: int, fronts: Fronts, leader: Program) -> bool:
    """One of them, which is started again and there when this returns; False: the run was over."""
    if not leader.running:
        return False
    killed = [*fronts.fronts, leader][number]
    began = killed.text().count(LEADS)
    killed.kill()
    killed.restart()
    if killed is leader:
        wait_until(lambda: not leader.running or leader.text().count(LEADS) > began, "a leader", [])
    else:
        wait_for_port(fronts.ports[number], killed)
    return True


def pause_until_deposed(leader: Program, second: Program) -> None:
    """The leader stands still for longer than its lease; it wakes up when the other one leads."""
    leader.wait_for("round opened")
    leader.process.send_signal(signal.SIGSTOP)
    second.wait_for(LEADS)
    leader.process.send_signal(signal.SIGCONT)
    assert leader.wait() == DEPOSED, leader.last_words()
    assert "deposed reason=" in leader.text()
