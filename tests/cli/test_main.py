"""The command itself: help, versions, one line for every mistake, and only what is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from fedmpq.cli.main import COMMANDS, Entry, main
from fedmpq.lab.experiment import ExperimentError
from fedmpq.training.engine import EngineError, engine_names

Capture = pytest.CaptureFixture[str]
SCRIPT = Path(sys.executable).with_name("fedmpq")


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def mistake(capsys: Capture, *words: str) -> str:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.rstrip()


# Help


def test_help_lists_every_command(capsys: Capture) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: fedmpq")
    for name, entry in COMMANDS.items():
        assert f"    {name}" in out
        assert entry.summary in out
    assert max(map(len, out.splitlines())) <= 80


def test_nothing_at_all_is_answered_with_help(capsys: Capture) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: fedmpq")
    assert "simulate" in err


def test_simulate_explains_itself(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(capsys, "simulate", "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    for flag in ("--data", "--budgets", "--resume", "--compare", "--json", "--learning-rate", "--no-flip"):
        assert flag in out
    for default in ("(default: 0.1)", "(default: resnet20)", "(default: 2,2,4,4,4,6,6,6,8,8)"):
        assert default in out
    assert "examples:\n  fedmpq simulate --data digits" in out
    for clutter in ("object at", "==SUPPRESS==", "None", "True", "False"):
        assert clutter not in out


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version") == (0, f"fedmpq {version('fedmpq')}\n", "")


# Info


def test_info_for_people_and_for_programs(capsys: Capture) -> None:
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines())
    assert lines["fedmpq"] == version("fedmpq")
    assert lines["engine torch"] == "ready"
    code, out, err = run(capsys, "info", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert out.count("\n") == 1
    assert facts["fedmpq"] == version("fedmpq")
    assert facts["engines"]["torch"] == "ready"
    assert set(facts["engines"]) == set(engine_names())
    assert facts["kernels"] == lines["kernels"]


def test_info_tells_of_an_engine_that_cannot_be_loaded(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise EngineError(f"engine {name!r} cannot be loaded")

    monkeypatch.setattr("fedmpq.cli.info.make_engine", broken)
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "cannot be loaded" in out


# Mistakes


def test_an_unknown_command_is_told_the_nearest(capsys: Capture) -> None:
    known = ", ".join(COMMANDS)
    assert mistake(capsys, "simulat") == (
        "fedmpq: there is no command 'simulat' (did you mean 'simulate'?); "
        f"there are {known}; see fedmpq --help"
    )
    assert mistake(capsys, "zebra") == (
        f"fedmpq: there is no command 'zebra'; there are {known}; see fedmpq --help"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--verbose"], ("fedmpq: unrecognized arguments: --verbose",)),
        (["info", "--jsn"], ("fedmpq info: unknown argument '--jsn'", "did you mean '--json'?")),
        (["simulate", "--roundz", "3"], ("fedmpq simulate:", "'--roundz'", "did you mean '--rounds'?")),
        (["simulate", "extra"], ("fedmpq simulate: unknown argument 'extra'",)),
        (["simulate", "--rounds", "x"], ("--rounds", "'x'")),
        (["simulate", "--rounds"], ("--rounds", "expected one argument")),
        (["simulate", "--budgets", "2,,4"], ("--budgets", "'' is not a number", "2,4,8")),
        (["simulate", "--seeds", "1.5"], ("--seeds", "'1.5' is not a number", "0,1,2")),
        (["simulate", "--profile", "bst"], ("--profile", "'bst'", "paper")),
    ],
)
def test_a_wrong_argument_is_one_line(capsys: Capture, words: list[str], expected: tuple[str, ...]) -> None:
    line = mistake(capsys, *words)
    for part in expected:
        assert part in line
    assert "--help" in line


# What a command may raise


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Puts a function in the place of a command `try`."""

    def install(function: Callable[[], int]) -> None:
        module = types.ModuleType("pretended_command")
        vars(module)["add_arguments"] = lambda parser: None
        vars(module)["run_command"] = lambda arguments: function()
        monkeypatch.setitem(sys.modules, "pretended_command", module)
        monkeypatch.setitem(COMMANDS, "try", Entry("pretended_command", "lab", "a test"))

    return install


Install = Callable[[Callable[[], int]], None]


def raising(error: BaseException) -> Callable[[], int]:
    def function() -> int:
        raise error

    return function


def test_a_commands_result_is_the_exit_code(capsys: Capture, command: Install) -> None:
    command(lambda: 7)
    assert run(capsys, "try") == (7, "", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ExperimentError("rounds = 0 is\ntoo small"), "fedmpq try: rounds = 0 is too small"),
        (EngineError("no engine"), "fedmpq try: no engine"),
        (
            PermissionError(13, "Permission denied", "/x"),
            "fedmpq try: [Errno 13] Permission denied: '/x'",
        ),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn"),
            "fedmpq try: 'sklearn' is not installed; install it: pip install \"fedmpq[lab]\"",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    capsys: Capture, command: Install, error: Exception, line: str
) -> None:
    command(raising(error))
    assert mistake(capsys, "try") == line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours to mend"),
        RuntimeError("ours to mend"),
        KeyError("ours to mend"),
        AssertionError("ours to mend"),
        ImportError("ours to mend"),
        ModuleNotFoundError("ours to mend", name="fedmpq.nowhere"),
    ],
)
def test_what_only_we_can_mend_keeps_its_traceback(command: Install, error: Exception) -> None:
    command(raising(error))
    with pytest.raises(type(error), match="ours to mend"):
        main(["try"])


def test_a_command_whose_packages_are_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "try", Entry("no_such_package.command", "server", "a test"))
    assert mistake(capsys, "try") == (
        "fedmpq try: 'no_such_package' is not installed; install it: pip install \"fedmpq[server]\""
    )
    monkeypatch.setitem(COMMANDS, "try", Entry("fedmpq.cli.nowhere", "server", "a test"))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        main(["try"])


def test_ctrl_c_while_starting_is_no_traceback(capsys: Capture, command: Install) -> None:
    command(raising(KeyboardInterrupt()))
    assert run(capsys, "try") == (130, "", "")


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run([SCRIPT, "info"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_command_line_loads_no_more_than_it_needs() -> None:
    """On a board neither the lab nor torch is installed, and starting must not take seconds."""
    script = (
        "import sys, contextlib, io\n"
        "from fedmpq.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "heavy = ('torch', 'numpy', 'rich')\n"
        "print([m for m in sys.modules if m.split('.')[0] in heavy or '.lab' in m])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_command_keeps_the_promise() -> None:
    for entry in COMMANDS.values():
        module = importlib.import_module(entry.module)
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert parser.description
        assert callable(module.run_command)
