"""Entropy codes of a layer's codes against zlib on the same planes: how long they are, and how fast both are.

The weights are normal, on the grid with the least error, as trained ones nearly are. Speed is in megabytes of
codes, a byte each, on one core; zlib is at its fastest level.
"""

from __future__ import annotations

import argparse
import json
import zlib
from typing import Any

import numpy as np

from bench.machine import Machine, warn_if_busy
from bench.timing import interleaved, load_average
from fedmpq import kernels
from fedmpq.model.grid import least_error_step, quantize

WEIGHTS = 270_000
BIT_WIDTHS = (2, 4, 6, 8)


def measure(bits: int, repetitions: int) -> dict[str, Any]:
    """Of `WEIGHTS` codes of so many bits."""
    weights = np.random.default_rng(bits).normal(0, 0.1, WEIGHTS).astype(np.float32)
    codes = quantize(weights, least_error_step(weights, bits), bits)
    planes = kernels.pack_planes(codes, bits).tobytes()
    coded = kernels.encode_codes(codes, bits, 2 * len(planes))
    if coded is None or not np.array_equal(kernels.decode_codes(coded, WEIGHTS, bits), codes):
        raise AssertionError(f"codes of {bits} bits do not come back")
    deflated = zlib.compress(planes, 1)
    jobs = {
        "encode": lambda: kernels.encode_codes(codes, bits, 2 * len(planes)),
        "decode": lambda: kernels.decode_codes(coded, WEIGHTS, bits),
        "deflate": lambda: zlib.compress(planes, 1),
        "inflate": lambda: zlib.decompress(deflated),
    }
    timings = interleaved(jobs, repetitions, 0.02)
    return {
        "bits": bits,
        "per_planes": round(len(coded) / len(planes), 4),
        "zlib_per_planes": round(len(deflated) / len(planes), 4),
        **{f"{name}_mb_s": round(WEIGHTS / 1e6 / timings.time(name).median, 1) for name in jobs},
    }


def table(results: list[dict[str, Any]]) -> str:
    """For a terminal."""
    names = list(results[0])
    rows = [names, *([str(result[name]) for name in names] for result in results)]
    return "\n".join("".join(f"{cell:>16}" for cell in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.codes", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="turns of each (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    before = load_average()
    warn_if_busy()
    results = [measure(bits, arguments.repetitions) for bits in BIT_WIDTHS]
    loads = {"load_average_before": before, "load_average_after": load_average()}
    facts = {"bench": "codes", **Machine.here().as_dict(), **loads, "results": results}
    print(json.dumps(facts) if arguments.json else table(results))


if __name__ == "__main__":
    main()
