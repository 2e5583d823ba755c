"""`python -m fedmpq.server.exporter`: writes the model files of a stored run, one for each distinct model.

The server starts this as a process of its own and never imports it: exporting loads torch, onnx and their
runtimes. What goes wrong is one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedmpq.data.data_card import data_facts
from fedmpq.data.dataset import DataError
from fedmpq.data.tasks import anomalies
from fedmpq.export.card import run_facts
from fedmpq.export.exporting import LabelledImages, export_model
from fedmpq.export.target import Target
from fedmpq.export.targets import find_target
from fedmpq.model.deployed import DeployedModel
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.stored_run import StoredRun, read_stored_run

FAILED = 1


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    try:
        if arguments.task == "check":
            for spec in arguments.targets:
                find_target(spec)
        else:
            target = find_target(arguments.target)
            stored = read_stored_run(
                StateFolder(arguments.state), arguments.run, arguments.blobs, arguments.round
            )
            export_run(stored, target, arguments.out)
    except ModuleNotFoundError as error:
        return _fail(f'{error.name!r} is not installed; install it: pip install "fedmpq[export]"')
    except (OSError, ValueError) as error:
        return _fail(str(error))
    return 0


def export_run(stored: StoredRun, target: Target, folder: Path) -> None:
    """The models that the run's clients deploy, each under the name of the first client that has it."""
    tests = _tests(stored)
    data = data_facts(stored.config.test_data, stored.value_range)
    for each in stored.method.deployments(stored.model, stored.model.clients):
        clients = [record.client for record in each.clients]
        boards = [stored.client_names[client] for client in clients]
        budget = each.clients[0].budget
        facts = run_facts(stored.run.name, stored.model.round, clients, budget, boards) | data
        model = DeployedModel(stored.graph, each.layers, each.side, stored.run.class_names, facts)
        path = folder / f"{stored.client_names[clients[0]]}{target.suffix}"
        export_model(model, path, target=target, tests=tests)


def _tests(stored: StoredRun) -> LabelledImages | None:
    """The run's test images, if it has some and they can still be read."""
    try:
        test = stored.load_test_data()
    except (DataError, ImportError) as error:
        print(f"without test images: {error}", file=sys.stderr)
        return None
    if test is None:
        return None
    return LabelledImages(
        test.images, test.labels, str(stored.config.test_data), test.targets, anomalies(test)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedmpq.server.exporter", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    check = tasks.add_parser("check", help="only load targets")
    check.add_argument("targets", nargs="+", metavar="TARGET")
    make = tasks.add_parser("make", help="write the files")
    make.add_argument("--state", type=Path, required=True, help="the server's folder")
    make.add_argument("--run", required=True, help="the run's id")
    make.add_argument("--blobs", required=True, help="where payloads are kept")
    make.add_argument("--round", type=int, metavar="N", help="whose model it is (default: the newest)")
    make.add_argument("--target", required=True, help="an export target's name, or package.module:Class")
    make.add_argument("--out", type=Path, required=True, help="the folder to write to")
    return parser


def _fail(message: str) -> int:
    print(" ".join(message.splitlines()), file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
