"""Bound calls that run one after the other in one call of the library: a training step has hundreds of them.

A step on few images takes as long as what Python does between its kernels. Here it does nothing between them:
the library walks a list of functions and of the addresses of their arguments (`include/fedmpq/program.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import addressof
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import Call, CheckedCall, Elements
from fedmpq.kernels.library import library

Action = Call | Callable[[], object]
"""A kernel's call, or something that Python does."""


class Program:
    """`calls` in their order: to call it runs them all. What one of them refuses is raised as if it ran
    alone."""

    def __init__(self, calls: Iterable[CheckedCall]) -> None:
        self.calls = tuple(calls)
        self._functions = np.array([_number(call.name) for call in self.calls], np.int32)
        values = [value for call in self.calls for value in call.values]
        self._addresses = np.array([addressof(value) for value in values], np.int64)
        self._stopped = np.zeros(1, np.int32)
        self._run = self._bound(None)

    def __call__(self) -> None:
        status = self._run()
        if status < 0:
            stopped = int(self._stopped[0])
            raise (self.calls[stopped] if stopped >= 0 else self._run).refusal(status)

    def timed(self) -> NDArray[np.float64]:
        """The seconds that each call takes are added up here from now on, by the clock of the thread."""
        seconds = np.zeros(len(self.calls))
        self._run = self._bound(seconds)
        return seconds

    def _bound(self, seconds: NDArray[np.float64] | None) -> Call:
        count = len(self.calls)
        return Call(
            "fedmpq_run",
            Elements(self._functions, count),
            count,
            Elements(self._addresses, self._addresses.size),
            self._addresses.size,
            Elements(self._stopped, 1),
            None if seconds is None else Elements(seconds, count),
        )


def in_one_go(actions: Iterable[Action]) -> list[Callable[[], object]]:
    """The same actions in the same order, neighbouring calls of kernels as one program."""
    arranged: list[Callable[[], object]] = []
    calls: list[CheckedCall] = []
    for action in actions:
        # What is derived from a call, such as one that a test watches, does something in Python.
        if type(action) is CheckedCall:
            calls.append(action)
            continue
        arranged += [Program(calls), action] if calls else [action]
        calls = []
    return [*arranged, Program(calls)] if calls else arranged


@cache
def _number(name: str) -> int:
    """By which the library knows one of its functions."""
    number: int = library.fedmpq_function(name.encode())
    if number < 0:
        raise ValueError(
            f"{name} cannot be part of a program: it is no function of training.h that returns a status"
        )
    return number
