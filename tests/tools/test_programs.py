"""Programs are watched, and ended with whoever started them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.programs import Program, ProgramError, free_ports, wait_until


def test_a_program_that_ends_early_is_told_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    with (
        Program(command, tmp_path / "log") as program,
        pytest.raises(ProgramError, match=r"ended with 3:\nno luck"),
    ):
        wait_until(lambda: False, "luck", [program])


def test_a_program_that_hears_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.programs.STOP_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    with Program([sys.executable, "-c", f"{deaf}; time.sleep(60)"], tmp_path / "log") as program:
        wait_until(lambda: "1" in program.last_words(), "its start", [program])
        assert program.peak_mb() > 1
        with pytest.raises(ProgramError, match="waited 0 s in vain for silence"):
            wait_until(lambda: False, "silence", [program], patience=0.0)
    assert program.process.returncode == -9


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20
