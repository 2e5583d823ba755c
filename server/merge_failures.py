"""Answers that cannot be merged: whose fault that is, and what becomes of the round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fedmpq.server.active_run import ReplayError
from fedmpq.server.blobs import BlobError
from fedmpq.server.round_facts import TooMuchWorse
from fedmpq.server.round_time import Timing
from fedmpq.server.round_work import RoundWork
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.records import OpenedRound

log = logging.getLogger("fedmpq.server")

MOST_TRIALS = 64
"""Answers beyond which nobody looks for the one to blame: every trial costs a merge and an evaluation."""
MAX_FAILURES = 3
"""A round that could not be merged so often, whoever was asked, waits for the operator."""

NOT_THE_ANSWERS = (OSError, MemoryError, StoreError, BlobError, ReplayError)
"""What a merge fails with for other reasons than what was merged."""


class MergeFailed(RuntimeError):
    """The answers of a closed round do not make a model; the message says why."""

    def __init__(self, cause: str, offenders: Sequence[int], *, worse: bool = False) -> None:
        super().__init__(cause)
        self.offenders = tuple(offenders)
        """Clients without whose answers the others can be merged; empty if none were found."""
        self.worse = worse
        """Whether it makes a model, but one that is too much worse than the last."""


def find_offenders(works: Callable[[Collection[int]], bool], clients: Sequence[int]) -> tuple[int, ...]:
    """The clients whose answers are to blame; `works` says if those of some clients can be merged.

    Those whose answers make no model even alone, if the others together do; or else the only one without whom
    the others do. Nobody, if that leaves it open who it was.
    """
    if not 2 <= len(clients) <= MOST_TRIALS:
        return ()
    bad = [client for client in clients if not works([client])]
    good = [client for client in clients if client not in bad]
    if bad and good and works(good):
        return tuple(bad)
    missing = [one for one in clients if works([client for client in clients if client != one])]
    return tuple(missing) if len(missing) == 1 else ()


@contextmanager
def blaming(work: RoundWork, closed: OpenedRound, timing: Timing) -> Iterator[None]:
    """Where answers cannot be merged, it is looked whose they are: MergeFailed says it."""
    try:
        yield
    except NOT_THE_ANSWERS:
        raise
    except Exception as error:
        log.info("a merge failed", exc_info=error)
        raise merge_failure(error, work, closed, timing) from error


def merge_failure(error: Exception, work: RoundWork, closed: OpenedRound, timing: Timing) -> MergeFailed:
    """Why the answers of a closed round do not make a model, and whose are to blame."""

    def works(kept: Collection[int]) -> bool:
        seats = [seat for seat in closed.seats if seat.answer is None or seat.client in kept]
        try:
            work.attempt(replace(closed, seats=tuple(seats)), timing)
        except NOT_THE_ANSWERS:
            raise
        except Exception:
            return False
        return True

    offenders = find_offenders(works, [seat.client for seat, _ in closed.answers()])
    cause = str(error) or type(error).__name__
    return MergeFailed(cause, offenders, worse=isinstance(error, TooMuchWorse))
