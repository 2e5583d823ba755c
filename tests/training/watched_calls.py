"""Bound calls that say when they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedmpq.kernels.call import Call


class Watched(Call):
    """`call`; what `after` makes of its result, unless None, is the result."""

    def __init__(
        self,
        call: Call,
        before: Callable[[], object] = lambda: None,
        after: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self._call, self._before, self._after = call, before, after
        self._kept, self.buffers = call._kept, call.buffers

    def __call__(self) -> Any:
        self._before()
        result = self._call()
        changed = self._after(result)
        return result if changed is None else changed
