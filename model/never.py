"""The end of a ladder of `isinstance` over a union: a type checker refuses one that leaves a member out."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """`typing.assert_never`, which Python 3.10 does not have."""
    raise AssertionError(f"nothing was written for {type(value).__name__}: {value!r}")
