"""The bit-serial form of a convolution (AND and popcount on bit-planes) against the products of bytes.

A ResNet's 3x3 layers of 4-bit codes; the ratio is the time of byte products over that of the bit-serial
form, so that more than 1 means that the latter is faster. `kernels/src/train/bitserial.cpp` says where it
is used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.timing import Spread, interleaved, load_average
from fedmpq import kernels
from fedmpq.kernels.bound import conv_forward
from fedmpq.kernels.tensors import Conv, StoredCodes
from fedmpq.model import grid

LAYERS = ((16, 32), (32, 16), (64, 8), (128, 4))  # channels, side of the image
BIT_WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Result:
    isa: str
    channels: int
    bits: int
    bytes_over_bits: Spread

    def as_dict(self) -> dict[str, object]:
        ratio = self.bytes_over_bits.as_dict()
        return {"isa": self.isa, "channels": self.channels, "bits": self.bits, "bytes_over_bits": ratio}


class Layer:
    """One 3x3 convolution, as many outputs as inputs."""

    def __init__(self, channels: int, side: int, bits: int, images: int) -> None:
        rng = np.random.default_rng(bits)
        sizes = images, side, side, channels, side, side, channels
        conv = Conv(*sizes, 3, 3, 1, 1, 1, 1, 1, 1, 1)
        codes = StoredCodes(rng.integers(0, 256, images * conv.inputs // 2, dtype=np.uint8), True, 0)
        weight_codes = rng.integers(0, 2**bits, (channels, channels, 3, 3), dtype=np.uint8)
        weights = grid.integer_weights(weight_codes, bits)
        self.acc = np.empty(images * conv.outputs, np.int32)
        self._forward = conv_forward(conv, codes, weights, 1, self.acc, None)

    def run(self, most_bits: int) -> None:
        kernels.force_bit_serial(most_bits)
        self._forward()


def measure(isa: str, images: int, repetitions: int, seconds_each: float) -> Iterator[Result]:
    kernels.force_isa(isa)
    for channels, side in LAYERS:
        for bits in BIT_WIDTHS:
            layer = Layer(channels, side, bits, images)
            layer.run(0)
            by_bytes = layer.acc.copy()
            layer.run(bits)
            np.testing.assert_array_equal(layer.acc, by_bytes)
            jobs = {"bytes": lambda layer=layer: layer.run(0), "bits": lambda layer=layer: layer.run(7)}
            timings = interleaved(jobs, repetitions, seconds_each)
            yield Result(isa, channels, bits, timings.ratio("bytes", "bits"))
    kernels.force_bit_serial(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bitserial", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--images", type=int, default=8, help="images a call (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=9, help="turns per rival (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.01, help="length of a turn (default %(default)s)")
    arguments = parser.parse_args()

    before, best = load_average(), kernels.isa()
    results = []
    if not arguments.json:
        print(f"load average before {before}")
        print("isa       channels  bits   bytes / bits (least to most)")
    for isa in kernels.supported_isas():
        for result in measure(isa, arguments.images, arguments.repetitions, arguments.seconds):
            results.append(result)
            ratio = result.bytes_over_bits
            if not arguments.json:
                spread = f"{ratio.median:6.2f} ({ratio.least:.2f} to {ratio.greatest:.2f})"
                print(f"{isa:10}{result.channels:>8}{result.bits:>6}   {spread}", flush=True)
    kernels.force_isa(best)
    if arguments.json:
        facts = {"bench": "bitserial", "images": arguments.images, "repetitions": arguments.repetitions}
        loads = {"load_average_before": before, "load_average_after": load_average()}
        print(json.dumps({**facts, **loads, "results": [result.as_dict() for result in results]}))


if __name__ == "__main__":
    main()
