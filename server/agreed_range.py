"""The range of measured values that a run's codes stand for: given in its settings, or agreed by its boards.

What boards agree on is stored before anyone hears of it and never changes again: a server that is killed goes
on with the same codes.
"""

from __future__ import annotations

import asyncio
import logging

from fedmpq.data.value_range import BOARDS, ValueRange, agreed_range
from fedmpq.server.active_run import ActiveRun
from fedmpq.server.resources import Resources
from fedmpq.server.run_range import remember_range
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


def is_open(active: ActiveRun) -> bool:
    """Whether the boards have yet to agree; until then no one is told of the run."""
    return active.config.data_range == BOARDS and active.value_range is None


async def agree(resources: Resources, active: ActiveRun) -> None:
    """Settle the range as soon as enough boards have said theirs: as many as a round needs to begin."""
    if not is_open(active):
        return
    here = [each for each in resources.connections.open() if active.may_train(each.client)]
    reported = {each.client.name: each.bounds for each in here if each.bounds is not None}
    needed = active.config.least_clients
    if len(reported) < needed:
        resources.waiting_for = (
            f"the bounds of the values of {needed} boards, {len(reported)} have said theirs"
        )
        return
    found = agreed_range([reported[name] for name in sorted(reported)])
    await asyncio.to_thread(remember_range, resources.store, active.run.run_id, found)
    active.use_range(found)
    say(log, "the boards agreed on a range", run=active.run.name, boards=len(reported), range=_short(found))


def _short(found: ValueRange) -> str:
    text = str(found)
    return text if len(text) <= 200 else f"{text[:200]}..."
