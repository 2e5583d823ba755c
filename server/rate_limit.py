"""How often something may happen: in bursts, then at a steady rate, for each address and for all together."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

MAX_ADDRESSES = 10_000
"""Whose counts are kept; beyond that those that were heard of longest ago are forgotten."""
_NETWORK_BITS = 64


@dataclass(frozen=True)
class Rate:
    """`burst` at once, and one more every `seconds` after that."""

    burst: int
    seconds: float


@dataclass
class _Bucket:
    left: float
    at: float


class RateLimit:
    """`each` for one address, `total` for all."""

    def __init__(self, each: Rate, total: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._each = each
        self._total = total
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._all = _Bucket(total.burst, clock())

    def take(self, address: str) -> float:
        """0 if it may happen now, and is counted; else the seconds until it may, if nothing else does."""
        wait = max(self._wait(self._all, self._total), self._wait(self._bucket(address), self._each))
        if wait == 0:
            self._add(address, -1)
        return wait

    def give_back(self, address: str) -> None:
        """What was taken did not happen."""
        self._add(address, 1)

    def _add(self, address: str, change: int) -> None:
        self._all.left += change
        self._bucket(address).left += change

    def _bucket(self, address: str) -> _Bucket:
        bucket = self._buckets.setdefault(address, _Bucket(self._each.burst, self._clock()))
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket

    def _wait(self, bucket: _Bucket, rate: Rate) -> float:
        """Fills the bucket up to now; the seconds until it holds one."""
        now = self._clock()
        bucket.left = min(rate.burst, bucket.left + (now - bucket.at) / rate.seconds)
        bucket.at = now
        return max(0.0, (1 - bucket.left) * rate.seconds)


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer, without its port; of IPv6 the network, for that is what one party
    has."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return kind
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))
