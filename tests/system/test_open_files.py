import resource
from collections.abc import Callable
from typing import Any

import pytest

from fedmpq.system.open_files import allow_open_files


def limits(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, may_raise: Callable[[int], bool]
) -> list[Any]:
    """A system with these limits; what it was asked for."""
    asked: list[Any] = []

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        asked.append(wanted)
        if wanted[1] > hard and not may_raise(wanted[1]):
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    return asked


def test_limits_are_raised_as_far_as_the_system_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = limits(monkeypatch, 1024, 4096, lambda _: False)
    assert allow_open_files(1000) == 1024
    assert asked == []
    assert allow_open_files(4000) == 4000
    assert allow_open_files(10_000) == 4096
    limits(monkeypatch, 1024, 4096, lambda _: True)
    assert allow_open_files(10_000) == 10_000
