"""`fedmpq info`: what this installation is and can do."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from typing import Any

from fedmpq import kernels
from fedmpq.training.engine import EngineError, engine_names, make_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print version, machine, the instruction set the kernels use, and the engines."
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(arguments: argparse.Namespace) -> int:
    facts: dict[str, Any] = {
        "fedmpq": version("fedmpq"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernels": kernels.isa(),
        "engines": {name: _state(name) for name in engine_names()},
    }
    if arguments.json:
        print(json.dumps(facts))
        return 0
    engines = {f"engine {name}": state for name, state in facts.pop("engines").items()}
    rows = facts | engines
    for name, fact in rows.items():
        print(f"{name:<{max(map(len, rows))}}  {fact}")
    return 0


def _state(name: str) -> str:
    try:
        make_engine(name)
    except EngineError as error:
        return str(error)
    return "ready"
