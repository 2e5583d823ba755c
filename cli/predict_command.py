"""`fedmpq predict`: what an exported model sees in images, or hears in recordings.

Needs ONNX Runtime and NumPy alone, and Pillow for images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError
from fedmpq.data.photo import read_photo, reason_of
from fedmpq.data.sound import is_sound, log_mel, read_wave
from fedmpq.export.format import ExportError
from fedmpq.export.onnx.runtime import OnnxRunner

BAR = 24


class ImageError(ValueError):
    """A file that is no image."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the likeliest classes of each image or recording by an exported .onnx model."
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument("images", type=Path, nargs="+", metavar="FILE", help="an image or a WAV file")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to print (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per image")


def run_command(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        raise ExportError(f"--top {arguments.top} is too few; the least is 1")
    runner = OnnxRunner(arguments.model)
    faults = []
    for path in arguments.images:
        try:
            image = read_image(path, runner)
        except ImageError as error:
            faults.append(str(error))
            continue
        shares = softmax(runner.logits(image)[0])
        best = [int(index) for index in np.argsort(-shares, kind="stable")[: arguments.top]]
        if arguments.json:
            classes = [{"class": runner.class_names[i], "probability": float(shares[i])} for i in best]
            print(json.dumps({"image": str(path), "classes": classes}))
        else:
            print(path)
            for index in best:
                print(f"  {shares[index]:6.1%}  {bar(shares[index])}  {runner.class_names[index]}")
    if faults:
        raise ImageError(f"{len(faults)} of {len(arguments.images)} files left out: {'; '.join(faults)}")
    return 0


def read_image(path: Path, runner: OnnxRunner) -> NDArray[np.uint8]:
    """The pixels, or a recording's features, as the model takes them, read as in training."""
    height, width, channels = runner.image_shape
    try:
        if is_sound(path.name) and channels == 1:
            return log_mel(*read_wave(str(path)), height, width)[None, :, :, None]
        return read_photo(str(path), (height, width), channels)[None]
    except DataError:
        raise
    # Pillow raises nearly anything on a damaged file.
    except Exception as error:
        raise ImageError(f"{path} is no image that can be read: {reason_of(error, str(path))}") from None


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum(), np.float32)


def bar(share: float) -> str:
    """`share` of a bar in eighths of a character."""
    full, eighths = divmod(round(share * BAR * 8), 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()).ljust(BAR)
