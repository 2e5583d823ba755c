"""Where a run's range of measured values is kept: in its settings, or among the store's facts."""

from __future__ import annotations

from fedmpq.data.value_range import BOARDS, ValueRange, parse_range
from fedmpq.server.run_config import RunConfig
from fedmpq.server.store.protocol import Store


def stored_range(store: Store, run_id: str, config: RunConfig) -> ValueRange | None:
    """The range of the run's codes; None: it has none, or its boards have not agreed yet."""
    if config.data_range is None:
        return None
    # A fact that goes by the run's id is its range.
    text = config.data_range if config.data_range != BOARDS else store.fact(run_id)
    return None if text is None else parse_range(text)


def remember_range(store: Store, run_id: str, found: ValueRange) -> None:
    """What the run's boards have agreed on."""
    store.remember(**{run_id: str(found)})
