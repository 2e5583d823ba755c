"""Keeps the layout's right-hand column true: which package may import which, and what a board never loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_BELOW = {"proto", "kernels", "system", "model", "data", "exchange"}
MAY_IMPORT: dict[str, set[str]] = {
    "proto": set(),
    "kernels": set(),
    "system": set(),
    "model": {"kernels", "proto", "system"},
    "data": {"system"},
    "exchange": {"model", "kernels", "proto", "system"},
    "training": {"exchange", "data", "model", "kernels", "system"},
    "method": {"exchange", "data", "model", "kernels", "system"},
    "edge_client": {"training", *_BELOW},
    "server": {"method", *_BELOW},
    "export": {"model", "system"},
    "lab": {"training", "method", "edge_client", "server", "export", *_BELOW},
    "dashboard": {"method", "server", "lab", *_BELOW},
    "cli": {"training", "method", "edge_client", "server", "export", "lab", "dashboard", *_BELOW},
}
# What a board loads must not need these; a room below it may reach for torch inside a function.
HEAVY = {"torch", "torchvision", "onnx", "onnxruntime", "executorch", "pandas"}
ON_THE_BOARD = {"proto", "kernels", "edge_client", "exchange", "training"}
LAZY_TORCH = {"model", "data", "system"}
LAZILY = {"torch", "torchvision"}
# For machines of researchers: the readable reference engine, and training in full precision.
TORCH_ENGINE = {
    "training/torch_engine.py",
    "training/torch_losses.py",
    "training/torch_ops.py",
    "training/torch_shapes.py",
    "training/float_trainer.py",
}
# A process that the server starts and never imports: there, and there alone, it loads what exports.
EXPORTER = "server/exporter.py"


@dataclass(frozen=True)
class Import:
    module: str  # absolute, dotted
    line: int
    lazy: bool  # inside a function, or for the type checker alone


class _Collector(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[Import] = []
        self._lazy = 0

    def _add(self, module: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Import(module, node.lineno, self._lazy > 0))

    def _visit_lazily(self, nodes: list[ast.stmt]) -> None:
        self._lazy += 1
        for node in nodes:
            self.visit(node)
        self._lazy -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_lazily(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_lazily(node.body)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._visit_lazily(node.body)
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node.module, node.level)
        for alias in node.names:
            self._add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._add(name.value, node)
        self.generic_visit(node)

    def _absolute(self, module: str | None, level: int) -> str:
        if level == 0:
            return module or ""
        parents = self.package.split(".")
        parents = parents[: len(parents) - (level - 1)]
        return ".".join([*parents, module] if module else parents)


def imports_of(source: str, file: str) -> list[Import]:
    """Every import in `source`, the text of `file`, a path such as "model/grid.py"."""
    collector = _Collector(".".join(["fedmpq", *Path(file).parent.parts]))
    collector.visit(ast.parse(source, file))
    return collector.found


def offence(file: str, found: Import) -> str | None:
    """Why `file` may not have this import, or None where it may."""
    package = Path(file).parts[0]
    top, _, rest = found.module.partition(".")
    if top in MAY_IMPORT:
        return f"imports bare {top!r}; the package is fedmpq.{top}"
    if top == "fedmpq":
        other = rest.partition(".")[0]
        if f"{found.module}.".startswith("fedmpq.server.exporter."):
            return "imports the server's exporter, which is a process of its own"
        allowed = MAY_IMPORT[package] | ({"export"} if file == EXPORTER else set())
        if other in MAY_IMPORT and other != package and other not in allowed:
            return f"imports fedmpq.{other}; {package} may import only {sorted(allowed)}"
        return None
    if top not in HEAVY:
        return None
    if package in ON_THE_BOARD and not (top == "torch" and file in TORCH_ENGINE):
        return f"imports {top}, which a board does not have"
    if package in LAZY_TORCH and not (top in LAZILY and found.lazy):
        return f"imports {top} at module level; {package} may import torch only inside a function"
    return None


def modules() -> Iterator[str]:
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix()


def test_every_module_keeps_to_the_table() -> None:
    offences = [
        f"{file}:{found.line} {reason}"
        for file in modules()
        for found in imports_of((ROOT / file).read_text(encoding="utf-8"), file)
        if (reason := offence(file, found)) is not None
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("model/grid.py", "import fedmpq.server"),
        ("model/grid.py", "from fedmpq import kernels, edge_client"),
        ("model/grid.py", "from ..server import state"),
        ("model/grid.py", "from .. import lab"),
        ("method/fedpaq.py", "import server.state"),
        ("method/state.py", "def f():\n    from fedmpq.training.engine import Engine"),
        ("method/state.py", "import importlib\nimportlib.import_module('fedmpq.lab.cells')"),
        ("export/onnx.py", "from fedmpq import kernels"),
        ("export/onnx/target.py", "from fedmpq.server import stored_run"),
        ("server/exports.py", "from fedmpq.export import targets"),
        ("server/exports.py", "def f():\n    from fedmpq.server import exporter"),
        ("server/exports.py", "from .exporter import main"),
        ("kernels/planes.py", "from fedmpq.model import grid"),
        ("training/engine.py", "def f():\n    import torch.nn"),
        ("training/torch_engine.py", "import torchvision"),
        ("model/trace.py", "import torch"),
        ("model/trace.py", "try:\n    from torch import nn\nexcept ImportError:\n    nn = None"),
        ("model/trace.py", "class Module:\n    import torch"),
        ("model/trace.py", "def f():\n    import onnx"),
    ],
)
def test_an_offence_is_seen(file: str, source: str) -> None:
    assert any(offence(file, found) for found in imports_of(source, file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "model/grid.py",
            "from fedmpq import kernels\nfrom fedmpq.proto import graph_pb2\nfrom . import planes",
        ),
        ("model/trace.py", "def f():\n    import torch"),
        ("model/trace.py", "if TYPE_CHECKING:\n    import torch"),
        ("training/torch_engine.py", "import torch\nfrom fedmpq.training import torch_ops"),
        (
            "lab/simulation.py",
            "import torch\nfrom fedmpq.server import state\nfrom ..edge_client import engine",
        ),
        ("export/onnx.py", "import onnx\nfrom ..model import graph"),
        ("server/exporter.py", "from fedmpq.export import targets\nfrom fedmpq.server import stored_run"),
    ],
)
def test_what_the_table_allows_passes(file: str, source: str) -> None:
    assert not [reason for found in imports_of(source, file) if (reason := offence(file, found))]


def test_a_board_loads_nothing_heavy() -> None:
    """Imports the packages a board has, and every module in them but the torch engine's."""
    names = [
        ".".join(["fedmpq", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
        for file in modules()
        if Path(file).parts[0] in ON_THE_BOARD | LAZY_TORCH and file not in TORCH_ENGINE
    ]
    assert {"fedmpq.edge_client", "fedmpq.model", "fedmpq.kernels"} <= set(names)
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
