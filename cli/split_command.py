"""`fedmpq split`: one data set into a file for each client, to try a federation on a few machines or on one.

The parts are those `fedmpq simulate` deals with the same data, alpha and seed, so both train the same model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_named
from fedmpq.lab.partition import class_histogram, dirichlet_partition
from fedmpq.model.calibration import MIN_SAMPLES

EPILOG = """example:
  fedmpq split --data digits --clients 4 --model digits_cnn -o parts
  fedmpq server parts/run.toml
  fedmpq client --server HOST:PORT --budget 4 --data parts/client-0.npz

Writes client-0.npz and so on, test.npz for the server, and run.toml, a run to begin from."""


@dataclass(frozen=True)
class _Division:
    train: Dataset
    test: Dataset
    parts: list[Dataset]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Divide a data set into one file per client, and write a run to begin from."
    parser.epilog = EPILOG
    parser.add_argument("--data", required=True, help="digits, fashion-mnist, cifar10:DIR, or a path")
    parser.add_argument("--clients", type=int, required=True, help="how many parts")
    parser.add_argument("--alpha", type=float, default=0.5, help="label skew; inf: even (default 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of the division and of run.toml (default 0)")
    parser.add_argument("--size", type=int, help="resize images to this many pixels a side")
    parser.add_argument("--train-limit", type=int, help="use at most so many training images")
    parser.add_argument("--test-limit", type=int, help="use at most so many test images")
    parser.add_argument("--model", default="resnet20", help="of run.toml (default resnet20)")
    parser.add_argument("--rounds", type=int, default=20, help="of run.toml (default 20)")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write to")


def run_command(arguments: argparse.Namespace) -> int:
    division = _divide(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = np.array(division.train.class_names)
    for number, part in enumerate(division.parts):
        np.savez(
            arguments.out / f"client-{number}.npz", images=part.images, labels=part.labels, class_names=names
        )
    np.savez(
        arguments.out / "test.npz",
        x_test=division.test.images,
        y_test=division.test.labels,
        class_names=names,
    )
    (arguments.out / "run.toml").write_text(_run_toml(arguments, division), encoding="utf-8")
    _print_parts(division)
    print(f"wrote {len(division.parts)} parts, test.npz and run.toml to {arguments.out}")
    return 0


def _divide(arguments: argparse.Namespace) -> _Division:
    train, test = load_named(
        arguments.data,
        train_limit=arguments.train_limit,
        test_limit=arguments.test_limit,
        size=arguments.size,
    )
    parts = dirichlet_partition(
        train.labels, arguments.clients, arguments.alpha, arguments.seed, min_per_client=MIN_SAMPLES
    )
    return _Division(train, test, [train.subset(part) for part in parts])


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
    # JSON's strings, numbers and lists are TOML's too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _print_parts(division: _Division) -> None:
    classes = len(division.train.class_names)
    for number, part in enumerate(division.parts):
        counts = class_histogram(part.labels, [np.arange(len(part))], classes)[0]
        print(f"client-{number}: {len(part)} images, by class {' '.join(map(str, counts))}")
