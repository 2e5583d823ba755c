"""Code that can be seen whole: how long a module, a class and a function may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("proto", "kernels", "system", "model", "data", "exchange", "training", "method", "edge_client"),
    *("server", "export", "lab", "dashboard", "cli", "fedmpq", "tools", "bench"),
)
PROTOTYPES = ROOT / "kernels" / "prototypes.py"
"""Written by tools.c_interface; as long as the C interface has functions."""
LINES_OF_A_MODULE = 450
LINES_OF_A_CLASS = 300
LINES_OF_A_FUNCTION = 60


def measured(folder: str) -> Iterator[Path]:
    """The Python files of a folder that people write: no generated stubs, no migrations."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        generated = path.stem.endswith(("_pb2", "_pb2_grpc")) or path == PROTOTYPES
        if not generated and "migrations" not in path.parts:
            yield path


def too_long(source: str, module_limit: int = LINES_OF_A_MODULE) -> list[str]:
    """What is above its limit in a module, each as one line; blank lines count, decorators do not."""
    count = len(source.splitlines())
    found = [f"the module has {count} lines, at most {module_limit}"] if count > module_limit else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            kind, limit = "class", LINES_OF_A_CLASS
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind, limit = "function", LINES_OF_A_FUNCTION
        else:
            continue
        assert node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > limit:
            found.append(f"{kind} {node.name} has {lines} lines, at most {limit}")
    return found


@pytest.mark.parametrize("folder", PACKAGES)
def test_everything_can_be_seen_whole(folder: str) -> None:
    offences = [
        f"{path.relative_to(ROOT)}: {offence}"
        for path in measured(folder)
        for offence in too_long(path.read_text(encoding="utf-8"))
    ]
    assert not offences, "\n".join(offences)


def test_a_test_can_be_seen_whole() -> None:
    """A module of tests may be longer: each test in it stands for itself."""
    offences = [
        f"{path.relative_to(ROOT)}: {offence}"
        for path in measured("tests")
        for offence in too_long(path.read_text(encoding="utf-8"), module_limit=1000)
    ]
    assert not offences, "\n".join(offences)


def test_what_is_too_long_is_seen() -> None:
    long = "def f():\n" + "    pass\n" * LINES_OF_A_FUNCTION
    assert too_long(long) == ["function f has 61 lines, at most 60"]
    decorated = "@a\n@b\nasync def f():\n" + "    pass\n" * LINES_OF_A_FUNCTION
    assert too_long(decorated) == ["function f has 61 lines, at most 60"]
    grown = "class C:\n" + "    a = 1\n" * LINES_OF_A_CLASS
    assert too_long(grown) == ["class C has 301 lines, at most 300"]
    inner = "class C:\n    def f(self):\n" + "        pass\n" * LINES_OF_A_FUNCTION
    assert too_long(inner) == ["function f has 61 lines, at most 60"]
    assert too_long("a = 1\n" * 451) == ["the module has 451 lines, at most 450"]


def test_what_just_fits_is_not() -> None:
    assert too_long("def f():\n" + "    pass\n" * (LINES_OF_A_FUNCTION - 1)) == []
    assert too_long("class C:\n" + "    a = 1\n" * (LINES_OF_A_CLASS - 1)) == []
    assert too_long("a = 1\n" * 450) == []
