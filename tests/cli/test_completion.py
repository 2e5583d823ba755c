"""`fedmpq completion`: scripts that real shells run."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fedmpq.cli.completion_command import SHELLS, whole_parser
from fedmpq.cli.main import COMMANDS, main

Capture = pytest.CaptureFixture[str]


def script(capsys: Capture, shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text: str, *words: str) -> list[str]:
    asked = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    commands = f"{asked}; _shtab_fedmpq; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{text}\n{commands}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_and_verbs(capsys: Capture) -> None:
    text = script(capsys, "bash")
    assert completed(text, "fedmpq", "sim") == ["simulate"]
    assert completed(text, "fedmpq", "server", "--lis") == ["--listen"]
    assert completed(text, "fedmpq", "server", "re") == ["rename", "revoke"]
    assert set(completed(text, "fedmpq", "")) >= set(COMMANDS)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_is_one_of_its_shell(capsys: Capture, shell: str) -> None:
    text = script(capsys, shell)
    if shutil.which(shell) is None:
        assert "fedmpq" in text
        return
    subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_no_command_is_left_out() -> None:
    parser, left_out = whole_parser()
    assert not left_out
    assert set(COMMANDS) <= set(parser.format_help().replace(",", " ").split())
