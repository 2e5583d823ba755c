"""`fedmpq export`: the models that a run's devices deploy, as verified ONNX and ExecuTorch files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fedmpq.data.dataset import DataError
from fedmpq.data.tasks import anomalies
from fedmpq.export.card import Card
from fedmpq.export.exporting import Exported, LabelledImages, export_model
from fedmpq.export.float_speed import SpeedMeter
from fedmpq.export.format import ExportError
from fedmpq.export.target import Target
from fedmpq.export.targets import TARGETS, find_target
from fedmpq.lab.run import Run, load_run
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.metrics import metric_named

EPILOG = """examples:
  fedmpq export --run runs/fedmpq-best-resnet20-0 --all -o models
  fedmpq export --run runs/demo/checkpoint.npz --budget 4 --format onnx -o models
  fedmpq export --run fedmpq-server --client camera-1 --format garden.targets:Tflite -o models

Every file is run by its own runtime against the integer reference before it is
kept. The speed is that of one image on one thread against the same network in
fp32 in the same runtime; the file's card has it against ONNX Runtime too."""

COLUMNS = ("model", "bits", "bare bytes", "file bytes", "ratio", "ms", "x fp32", "accuracy", "agreement")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Write the models that a run's devices deploy, each verified by its own runtime."
    parser.epilog = EPILOG
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="RUN",
        help="a simulation's folder or checkpoint, or a server's state folder",
    )
    parser.add_argument(
        "--run-name", metavar="NAME", help="of a server's run (default: the newest that has a model)"
    )
    parser.add_argument("--blobs", metavar="URL", help="where that server keeps payloads, if elsewhere")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--client", metavar="ID", help="the model of this client: its name or number")
    which.add_argument("--budget", type=float, metavar="BITS", help="a model of so many bits per weight")
    which.add_argument("--all", action="store_true", help="every distinct model that clients run")
    parser.add_argument(
        "--format",
        default="onnx",
        metavar="LIST",
        help=f"{', '.join(TARGETS)} or your own as MODULE:CLASS; several with commas (default: onnx)",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--no-speed", action="store_true", help="do not measure speed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")


def run_command(arguments: argparse.Namespace) -> int:
    targets = _targets(arguments.format)
    run = load_run(arguments.run, name=arguments.run_name, blobs=arguments.blobs)
    tests = _tests(run)
    speed = None if arguments.no_speed else SpeedMeter()
    exported = []
    for name, model in _chosen(run, arguments):
        for target in targets:
            path = arguments.out / f"{name}{target.suffix}"
            exported.append(export_model(model, path, target=target, tests=tests, speed=speed))
            if arguments.json:
                print(json.dumps({"path": str(exported[-1].path), **exported[-1].card}), flush=True)
    if not arguments.json:
        print(_table(exported))
    return 0


def _targets(text: str) -> list[Target]:
    """The targets in the order given, each once; no two of them may write the same files."""
    specs = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    if not specs:
        raise ExportError(f"--format {text!r} names no target; take {', '.join(TARGETS)}")
    by_suffix: dict[str, str] = {}
    targets = []
    for spec in specs:
        target = find_target(spec)
        other = by_suffix.setdefault(target.suffix, spec)
        if other != spec:
            raise ExportError(
                f"--format: {other} and {spec} both write {target.suffix} files; export them one at a time,"
                " each to its own folder"
            )
        targets.append(target)
    return targets


def _tests(run: Run) -> LabelledImages | None:
    """The run's test images; a server need not have them."""
    try:
        test = run.test_data()
    except (DataError, ImportError) as error:
        print(
            f"without test images, so verified on random ones and without accuracy: {error}", file=sys.stderr
        )
        return None
    if test is None:
        return None
    return LabelledImages(test.images, test.labels, run.test_source, test.targets, anomalies(test))


def _chosen(run: Run, arguments: argparse.Namespace) -> list[tuple[str, DeployedModel]]:
    """The models to export, by the name their files get."""
    if arguments.budget is not None:
        return [(f"budget-{arguments.budget:g}", run.deployed(budget=arguments.budget))]
    records = run.model.clients if arguments.client is None else [run.client(arguments.client)]
    return [
        (run.client_names[each.clients[0].client], run.model_of(each)) for each in run.deployments(records)
    ]


def _table(exported: Sequence[Exported]) -> str:
    metric = metric_named(exported[0].card["metric"] if exported else "").title
    heading = tuple(metric if name == "accuracy" else name for name in COLUMNS)
    rows = [heading, *(_row(each) for each in exported)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(card: Card) -> str:
    """The task's metric."""
    value: float = card[card["metric"]]
    return f"{value:.2%}" if metric_named(card["metric"]).is_share else f"{value:.4f}"


def _row(exported: Exported) -> tuple[str, ...]:
    card, speed = exported.card, exported.card["speed"]
    return (
        exported.path.name,
        f"{card['average_bits']:.2f}",
        f"{card['bare_bytes']:,}",
        f"{card['file_bytes']:,}",
        f"{card['size_ratio']:.3f}",
        f"{speed['milliseconds']:.2f}" if speed else "-",
        f"{speed['speedup']:.2f}" if speed else "-",
        "-" if card[card["metric"]] is None else _number(card),
        f"{card['verified_images']} of {card['verified_images']} images",
    )
