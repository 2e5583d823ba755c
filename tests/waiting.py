"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def until(condition: Callable[[], Result], seconds: float = 60.0) -> Result:
    """What the condition gives once that is true."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
    return result
