"""How long a round waits for its boards if nobody says: it follows from how long they took before.

With `slowest[r]` the seconds from a place given to the last answer in time of round `r`, the next round waits

    min(MOST_SECONDS, max(LEAST_SECONDS, FACTOR * max(slowest[r] of the last ROUNDS rounds)))

and FIRST_SECONDS if none of them is known. The seconds are stored with each merged round, so a restart comes
to the same. A round that outlived a server process has none: it says more of the server than of its boards.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmpq.server.store.protocol import Store

SLOWEST = "slowest_seconds"
"""The name of the fact among a round's metrics."""
ROUNDS = 5
FACTOR = 4.0
FIRST_SECONDS = 3600.0
LEAST_SECONDS = 300.0
MOST_SECONDS = 7 * 86400.0


def learned_seconds(slowest: Sequence[float]) -> float:
    if not slowest:
        return FIRST_SECONDS
    return min(MOST_SECONDS, max(LEAST_SECONDS, FACTOR * max(slowest)))


def slowest_answers(store: Store, run_id: str) -> tuple[float, ...]:
    """Of the last merged rounds of the run, where known."""
    found = (metrics.get(SLOWEST) for metrics in store.last_metrics(run_id, ROUNDS))
    return tuple(float(seconds) for seconds in found if seconds is not None)
