"""Instructions of one inference by ONNX Runtime on emulated ARM boards: the exported model beside the same
network in fp32 and in ONNX Runtime's own static int8.

Counts repeat exactly, where times under emulation mean nothing. They are not time either: a Cortex-A72 takes
longer for some instructions than for others. One thread, one image; the models are those of bench.inference.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.inference import float_rivals, make_model
from fedmpq.export.float_network import normalised
from fedmpq.export.onnx.lowering import lower_to_onnx
from fedmpq.export.verify import random_images
from fedmpq.method.pruning_growing import BudgetError
from fedmpq.model import zoo
from tools import arm_board
from tools.arm_board import CPUS, BoardError
from tools.arm_instructions import Counting
from tools.wheels import WheelError


def write_models(name: str, bits: float, folder: Path) -> None:
    """The rivals as files, each with its image beside it."""
    model = make_model(name, bits)
    pixels = random_images(model.graph, 2)[:1]
    fp32, static_int8 = float_rivals(model)
    exported = lower_to_onnx(model.program, model.layers, {"classes": model.class_names}).to_bytes()
    real = normalised(model.graph, pixels)
    for rival, content, images in (
        ("exported", exported, pixels),
        ("static int8", static_int8, real),
        ("fp32", fp32, real),
    ):
        (folder / f"{rival}.onnx").write_bytes(content)
        np.save(folder / f"{rival}.npy", images)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.arm_inference", description=__doc__)
    parser.add_argument("--model", choices=zoo.names(), default="resnet20")
    parser.add_argument("--bits", type=float, default=4.0, help="bits per weight (default %(default)s)")
    arguments = parser.parse_args()
    try:
        with TemporaryDirectory() as scratch:
            models = Path(scratch) / "models"
            models.mkdir()
            write_models(arguments.model, arguments.bits, models)
            counting = Counting(arm_board.make(), Path(scratch))
            print(f"{arguments.model}, one image, millions of instructions\n")
            for cpu in CPUS:
                counts = counting.inference(models, cpu)
                print(f"| {cpu} | millions | x fp32 |\n|---|---:|---:|")
                for rival, count in counts.items():
                    print(f"| {rival} | {count / 1e6:.1f} | {counts['fp32'] / count:.2f} |")
                print(flush=True)
    except (BoardError, BudgetError, WheelError) as error:
        sys.exit(f"arm_inference: {error}")


if __name__ == "__main__":
    main()
