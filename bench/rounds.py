"""What a federation of several rounds takes, whoever runs it: seconds, and bytes counted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.tcp_proxy import Proxy

CLIENTS = 2


@dataclass(frozen=True)
class Rounds:
    """Start-up is no part of them: the first round only marks where the second begins."""

    seconds: list[float]
    """Of each round."""
    up: list[int]
    """Bytes of each client in each round."""
    down: list[int]


@dataclass(frozen=True)
class Moment:
    """When a round was over."""

    seconds: float
    """By the steady clock."""
    cpu_seconds: float
    """Of all processes that take part, since some moment before."""


def between(moments: Sequence[float]) -> list[float]:
    return [end - start for start, end in pairwise(moments)]


def bytes_between(proxy: Proxy, moments: Sequence[float]) -> tuple[list[int], list[int]]:
    """Up and down through a proxy between one moment and the next."""
    counts = [proxy.passed(moment) for moment in moments]
    up = [after.up - before.up for before, after in pairwise(counts)]
    return up, [after.down - before.down for before, after in pairwise(counts)]
