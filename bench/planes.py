"""Bit-plane kernels against memcpy and against NumPy doing the same job.

The memcpy copies as many bytes as there are codes into memory that is already there; the kernels and NumPy
allocate their result, as they do in use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.timing import Job, Spread, interleaved, load_average
from fedmpq import kernels

RESNET20_WEIGHTS = 270_000
BEYOND_CACHE_WEIGHTS = 16 * 2**20
BIT_WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class Result:
    job: str
    weights: int
    bits: int
    seconds: Spread
    times_memcpy: Spread  # kernel's time / memcpy's time
    numpy_times_kernel: Spread  # NumPy's time / kernel's time

    def as_dict(self) -> dict[str, object]:
        return {
            "job": self.job,
            "weights": self.weights,
            "bits": self.bits,
            "seconds": self.seconds.as_dict(),
            "times_memcpy": self.times_memcpy.as_dict(),
            "numpy_times_kernel": self.numpy_times_kernel.as_dict(),
        }


def pack_by_numpy(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    return np.stack([np.packbits((codes >> i) & 1, bitorder="little") for i in range(bits)])


def unpack_by_numpy(planes: NDArray[np.uint8], m: int) -> NDArray[np.uint8]:
    codes = np.zeros(m, np.uint8)
    for i, plane in enumerate(planes):
        codes |= np.unpackbits(plane, count=m, bitorder="little") << i
    return codes


def popcount_by_numpy(planes: NDArray[np.uint8]) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.bitwise_count(planes).sum(axis=1, dtype=np.int64)
    return counts


def rivals(weights: int, bits: int) -> dict[str, tuple[Job, Job]]:
    """For each job, the kernel and NumPy, after a check that both give the same."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, weights, dtype=np.uint8)
    planes = kernels.pack_planes(codes, bits)
    pairs: dict[str, tuple[Job, Job]] = {
        "pack": (lambda: kernels.pack_planes(codes, bits), lambda: pack_by_numpy(codes, bits)),
        "unpack": (lambda: kernels.unpack_planes(planes, weights), lambda: unpack_by_numpy(planes, weights)),
        "popcount": (lambda: kernels.popcount_planes(planes), lambda: popcount_by_numpy(planes)),
    }
    for job, (kernel, numpy) in pairs.items():
        np.testing.assert_array_equal(kernel(), numpy(), err_msg=job)
    return pairs


def measure(weights: int, bits: int, repetitions: int, seconds_each: float) -> Iterator[Result]:
    source = np.zeros(weights, np.uint8)
    target = np.ones(weights, np.uint8)
    for job, (kernel, numpy) in rivals(weights, bits).items():
        jobs = {"kernel": kernel, "memcpy": lambda: np.copyto(target, source), "numpy": numpy}
        timings = interleaved(jobs, repetitions, seconds_each)
        times_memcpy, numpy_times_kernel = timings.ratio("kernel", "memcpy"), timings.ratio("numpy", "kernel")
        yield Result(job, weights, bits, timings.time("kernel"), times_memcpy, numpy_times_kernel)


def row(result: Result) -> str:
    def ratio(spread: Spread) -> str:
        return f"{spread.median:7.2f} ({spread.least:.2f} to {spread.greatest:.2f})"

    head = f"{result.job:9}{result.weights:>10,}{result.bits:>5}{result.seconds.median * 1e6:>11,.1f}"
    return f"{head}  {ratio(result.times_memcpy):26}{ratio(result.numpy_times_kernel)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planes", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repetitions", type=int, default=9, help="turns per rival (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.01, help="length of a turn (default %(default)s)")
    arguments = parser.parse_args()

    before = load_average()
    results = []
    if not arguments.json:
        print(f"instruction set {kernels.isa()}, load average before {before}")
        print("job         weights bits  kernel us  x memcpy (least to most)  NumPy x kernel (least to most)")
    for weights in (RESNET20_WEIGHTS, BEYOND_CACHE_WEIGHTS):
        for bits in BIT_WIDTHS:
            for result in measure(weights, bits, arguments.repetitions, arguments.seconds):
                results.append(result)
                if not arguments.json:
                    print(row(result), flush=True)
    after = load_average()
    if arguments.json:
        facts = {"bench": "planes", "isa": kernels.isa(), "repetitions": arguments.repetitions}
        loads = {"load_average_before": before, "load_average_after": after}
        print(json.dumps({**facts, **loads, "results": [result.as_dict() for result in results]}))
    else:
        print(f"load average after {after}")


if __name__ == "__main__":
    main()
