"""The shortest names for the values of a graph: of a small model a good part is names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from itertools import product
from string import ascii_letters, digits


def short_names(uses: Counter[str], taken: AbstractSet[str] = frozenset()) -> dict[str, str]:
    """A name for each but those `taken`: one letter for those used most, then two and so on."""
    ranked = sorted(uses, key=lambda name: -uses[name])
    short: list[str] = []
    length = 1
    while len(short) < len(ranked):
        tails = product(ascii_letters + digits, repeat=length - 1)
        names = [first + "".join(tail) for tail in tails for first in ascii_letters]
        short += [name for name in names if name not in taken]
        length += 1
    return dict(zip(ranked, short, strict=False))
