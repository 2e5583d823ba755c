"""Which items the threads of a kernel take: each has neighbours of its own, the same ones in every kernel."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "src" / "train"


@dataclass(frozen=True)
class Case:
    """Threads that take one item each in the order of `turns`."""

    items: int
    threads: int
    last_first: bool
    turns: tuple[int, ...]

    @property
    def line(self) -> str:
        return " ".join(map(str, (self.items, self.threads, int(self.last_first), *self.turns)))

    def shares(self) -> list[list[int]]:
        """The items of each thread in the order in which it takes them."""
        used = max(1, min(self.threads, self.items))
        bounds = [self.items * thread // used for thread in range(used + 1)]
        shares = [list(range(first, last)) for first, last in itertools.pairwise(bounds)]
        return [share[::-1] for share in shares] if self.last_first else shares

    def expected(self) -> list[tuple[int, int]]:
        """What each turn gives: an item, or -1, and which one of its own the thread takes next, or -1."""
        shares, found = self.shares(), []
        for thread in self.turns:
            mine = next((each for each in shares[thread:] + shares[:thread] if each), None)
            own = mine is None or mine is shares[thread]
            item = mine.pop(0) if mine is not None else -1
            following = shares[thread][0] if own and shares[thread] else -1
            found.append((item, following))
        return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("shares") / "shares"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    source = str(HERE / "shares.cpp")
    command = [compiler, "-std=c++17", "-pthread", f"-I{SOURCES}", source, "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def answers(program: Path, cases: Sequence[Case]) -> list[list[tuple[int, int]]]:
    asked = "".join(f"{case.line}\n" for case in cases)
    done = subprocess.run([program], input=asked, capture_output=True, text=True, check=True)
    numbers = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return [list(zip(line[::2], line[1::2], strict=True)) for line in numbers]


def test_a_thread_does_its_share_and_then_what_is_left_of_the_others(program: Path) -> None:
    drawn = random.Random(7)
    cases = []
    for _ in range(500):
        items, threads = drawn.randrange(0, 70), drawn.randrange(1, 9)
        used = max(1, min(threads, items))
        turns = tuple(drawn.randrange(used) for _ in range(drawn.randrange(items + 2 * used + 1)))
        cases.append(Case(items, threads, drawn.random() < 0.5, turns))
    for case, found in zip(cases, answers(program, cases), strict=True):
        assert found == case.expected(), case


def test_in_either_order_a_thread_has_the_same_items(program: Path) -> None:
    turns = tuple([0, 1] * 32)
    first, last = answers(program, [Case(64, 2, False, turns), Case(64, 2, True, turns)])
    for thread, share in enumerate([range(32), range(32, 64)]):
        assert [item for item, _ in first[thread::2]] == list(share)
        assert [item for item, _ in last[thread::2]] == list(reversed(share))
