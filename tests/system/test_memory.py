"""What memory a process may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmpq.system import memory
from fedmpq.system.machine import physical_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("800M", 800 << 20), ("2G", 2 << 30), ("1.5 GiB", 3 << 29), ("64kb", 64 << 10), ("12", 12)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert memory.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "much", "-3G", "0%", "101%", "x%", "3 apples"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|could not convert"):
        memory.parse_size(text)


def test_a_share_of_what_is_there() -> None:
    assert 0 < memory.parse_size("50%") <= physical_memory() // 2


def test_a_container_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("70000000\n")
    (tmp_path / "memory.current").write_text("30000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory() == 40_000_000
    assert memory.memory_given() == 32_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 40_000_000


def test_what_is_given_counts() -> None:
    memory.give_memory(5)
    assert memory.memory_given() == 5
    memory.give_memory(None)
    assert memory.memory_given() > 5


def test_sizes_in_messages() -> None:
    given = (3, 2048, 6_335_076_762, 103_079_215_104, 5 << 50)
    assert [memory.size_text(size) for size in given] == ["3 bytes", "2 KiB", "5.9 GiB", "96 GiB", "5120 TiB"]
