"""`fedmpq split`: one data set into a file for each client, to try a federation on a few machines or on one.

The parts are those `fedmpq simulate` deals with the same data, alpha and seed, so both train the same model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_measured
from fedmpq.data.samples import Samples
from fedmpq.data.tasks import trained_on
from fedmpq.lab.partition import class_histogram, dirichlet_partition
from fedmpq.lab.simulation import range_of
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.task import CLASSIFICATION, TASKS

EPILOG = """example:
  fedmpq split --data digits --clients 4 --model digits_cnn -o parts
  fedmpq server parts/run.toml
  fedmpq client --server HOST:PORT --budget 4 --data parts/client-0.npz

Writes client-0.npz and so on, test.npz for the server, and run.toml, a run to begin from."""


@dataclass(frozen=True)
class _Division:
    train: Dataset
    test: Samples
    parts: list[Samples]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Divide a data set into one file per client, and write a run to begin from."
    parser.epilog = EPILOG
    parser.add_argument("--data", required=True, help="digits, fashion-mnist, cifar10:DIR, or a path")
    parser.add_argument("--clients", type=int, required=True, help="how many parts")
    parser.add_argument("--alpha", type=float, default=0.5, help="label skew; inf: even (default 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of the division and of run.toml (default 0)")
    parser.add_argument("--size", type=int, help="resize images to this many pixels a side")
    parser.add_argument(
        "--data-range", metavar="RANGE", help="of run.toml, for measured values: LOW..HIGH, or boards"
    )
    parser.add_argument(
        "--task", choices=TASKS, default=CLASSIFICATION, help="of run.toml (default: %(default)s)"
    )
    parser.add_argument("--train-limit", type=int, help="use at most so many training images")
    parser.add_argument("--test-limit", type=int, help="use at most so many test images")
    parser.add_argument("--model", default="resnet20", help="of run.toml (default resnet20)")
    parser.add_argument("--rounds", type=int, default=20, help="of run.toml (default 20)")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write to")


def run_command(arguments: argparse.Namespace) -> int:
    division = _divide(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(division.parts):
        _save(arguments.out / f"client-{number}.npz", part, "images", "samples", "labels")
    _save(arguments.out / "test.npz", division.test, "x_test", "samples_test", "y_test", "labels_test")
    (arguments.out / "run.toml").write_text(_run_toml(arguments, division), encoding="utf-8")
    _print_parts(division)
    print(f"wrote {len(division.parts)} parts, test.npz and run.toml to {arguments.out}")
    return 0


def _save(path: Path, part: Samples, images: str, samples: str, *labels: str) -> None:
    """Codes as images, measured values as samples with their channels first."""
    names, answers = np.array(part.class_names), part.labels if part.targets is None else part.targets
    arrays: dict[str, Any] = {"class_names": names}
    if part.is_coded:
        arrays |= {images: part.values, labels[0]: answers}
    else:
        arrays |= {samples: part.values.transpose(0, 3, 1, 2), labels[-1]: answers}
    np.savez(path, **arrays)


def _divide(arguments: argparse.Namespace) -> _Division:
    train, test = load_measured(
        arguments.data,
        train_limit=arguments.train_limit,
        test_limit=arguments.test_limit,
        size=arguments.size,
        task=arguments.task,
    )
    train = trained_on(train, arguments.task)
    indices = dirichlet_partition(
        train.labels, arguments.clients, arguments.alpha, arguments.seed, min_per_client=MIN_SAMPLES
    )
    parts = [train.subset(part) for part in indices]
    measured = arguments.data_range is not None and not train.is_coded
    value_range = range_of(arguments.data_range, parts) if measured else None
    return _Division(train.coded(value_range), test, parts)


def _run_toml(arguments: argparse.Namespace, division: _Division) -> str:
    """The normalisation is that of all training images, which no single client could know."""
    scale, zero_point = division.train.normalisation()
    clients = len(division.parts)
    settings = {
        "name": arguments.out.resolve().name,
        "model": arguments.model,
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "clients_per_round": clients,
        "image": list(division.train.image_shape),
        "class_names": list(division.train.class_names),
        "input_scale": scale,
        "input_zero_point": zero_point,
        "test_data": "test.npz",
    }
    if arguments.data_range is not None:
        settings["data_range"] = arguments.data_range
    if arguments.task != CLASSIFICATION:
        settings["task"] = arguments.task
    # JSON's strings, numbers and lists are TOML's too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _print_parts(division: _Division) -> None:
    classes = len(division.train.class_names)
    for number, part in enumerate(division.parts):
        if part.targets is not None:
            print(f"client-{number}: {len(part)} samples of {part.targets.shape[1]} targets")
            continue
        counts = class_histogram(part.labels, [np.arange(len(part))], classes)[0]
        print(f"client-{number}: {len(part)} images, by class {' '.join(map(str, counts))}")
