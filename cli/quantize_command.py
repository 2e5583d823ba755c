"""`fedmpq quantize`: a network trained elsewhere, in mixed precision under a budget, as a verified file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_named
from fedmpq.data.tasks import anomalies, trained_on
from fedmpq.export.exporting import LabelledImages, export_model
from fedmpq.method.post_training import QuantizeError
from fedmpq.method.quantize import quantize
from fedmpq.method.trained_network import DEFAULT_ACTIVATION_BITS
from fedmpq.method.warm_start import load_into, read_weights
from fedmpq.model import zoo
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.first_model import seeded_module
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.metrics import METRICS
from fedmpq.model.task import CLASSIFICATION, TASKS, outputs_of

EPILOG = """examples:
  fedmpq quantize resnet20 --weights resnet20.pt --calibration cifar10/ \\
                  --mean 0.491,0.482,0.447 --std 0.247,0.243,0.262 --budget 4 -o model.onnx
  fedmpq quantize my_networks:garden --weights garden.pt --calibration photos/ --size 64 \\
                  --budget 3 -o garden.pte.xz

Calibration images are like those the model will see; labels are used only to
tell the accuracy. The file is run by its own runtime against the integer
reference before it is kept."""
CALIBRATION_IMAGES = 2048
TEST_IMAGES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Quantize a trained network to a budget of bits per weight, without training."
    parser.epilog = EPILOG
    parser.add_argument(
        "model", metavar="MODEL", help=f"{', '.join(zoo.names())}, or your own as MODULE:FUNCTION"
    )
    parser.add_argument("--weights", required=True, metavar="W.pt", help="its state dict, or a run's folder")
    parser.add_argument("--budget", type=float, required=True, metavar="BITS", help="bits per weight, 1..8")
    parser.add_argument(
        "--calibration", required=True, metavar="DATA", help="images: a folder, an .npz or a known name"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="x.onnx or x.pte.xz")
    parser.add_argument("--size", type=int, metavar="N", help="resize images to this height and width")
    parser.add_argument(
        "--mean", type=_numbers, default=(0.0,), metavar="LIST", help="of pixels in 0..1 (default: 0)"
    )
    parser.add_argument(
        "--std", type=_numbers, default=(1.0,), metavar="LIST", help="of pixels in 0..1 (default: 1)"
    )
    parser.add_argument(
        "--activation-bits",
        type=int,
        default=DEFAULT_ACTIVATION_BITS,
        metavar="N",
        help=f"bits of activations behind a ReLU (default: {DEFAULT_ACTIVATION_BITS})",
    )
    parser.add_argument(
        "--task", choices=TASKS, default=CLASSIFICATION, help="what its outputs are (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the file's card as JSON")


def run_command(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.budget <= MAX_BITS:
        raise QuantizeError(f"--budget {arguments.budget:g} is outside 1..{MAX_BITS} bits per weight")
    train, test = load_named(
        arguments.calibration,
        train_limit=CALIBRATION_IMAGES,
        test_limit=TEST_IMAGES,
        size=arguments.size,
        task=arguments.task,
    )
    model = _quantized(arguments, trained_on(train, arguments.task))
    tests = LabelledImages(test.images, test.labels, targets=test.targets, anomalous=anomalies(test))
    exported = export_model(model, arguments.out, tests=tests)
    card = exported.card
    if arguments.json:
        print(json.dumps({"path": str(exported.path), **card}))
        return 0
    widths = ", ".join(f"{name} {bits}" for name, bits in model.bit_widths.items())
    print(f"bits    {model.bits_per_weight:.2f} per weight: {widths}")
    print(f"file    {exported.path}, {card['file_bytes']:,} bytes, equal to the bit on its own runtime")
    if arguments.task == CLASSIFICATION:
        print(f"correct {card['accuracy']:.2%} of {len(test):,} labelled images of {arguments.calibration}")
        return 0
    metric = METRICS[arguments.task]
    print(f"{metric.title:<7} {metric.text(card[metric.key])} on {len(test):,} of {arguments.calibration}")
    return 0


def _quantized(arguments: argparse.Namespace, calibration: Dataset) -> DeployedModel:
    outputs = outputs_of(arguments.task, len(calibration.class_names), calibration.image_shape)
    module = seeded_module(arguments.model, 0, outputs, calibration.image_shape[2])
    load_into(module, read_weights(arguments.weights))
    return quantize(
        module.eval(),
        arguments.budget,
        calibration,
        mean=_one_or_all(arguments.mean),
        std=_one_or_all(arguments.std),
        activation_bits=arguments.activation_bits,
        task=arguments.task,
    )


def _one_or_all(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or a list such as 0.5,0.5,0.5") from None
