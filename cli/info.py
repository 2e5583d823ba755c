"""`fedmpq info`: what this installation is and can do."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version

from fedmpq import kernels
from fedmpq.edge_client.engine import EngineError, engine_names, make_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print version, machine, the instruction set the kernels use, and the engines."
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(arguments: argparse.Namespace) -> int:
    facts = {
        "fedmpq": version("fedmpq"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernels": kernels.isa(),
        "engines": {name: _state(name) for name in engine_names()},
    }
    if arguments.json:
        print(json.dumps(facts))
        return 0
    for name, fact in facts.items():
        for key, value in fact.items() if isinstance(fact, dict) else ((name, fact),):
            print(f"{name if key == name else f'engine {key}':<14} {value}")
    return 0


def _state(name: str) -> str:
    try:
        make_engine(name)
    except EngineError as error:
        return str(error)
    return "ready"
