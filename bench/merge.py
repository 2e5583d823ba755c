"""The merge of a round: its kernel against memcpy, and the whole of it against the same in floating point.

The kernel adds the packed changes of some boards to int64 sums, in one pass. The memcpy copies as many bytes
as the weights of one board have unpacked, as float32, into memory that is already there: 4 bytes read and 4
written a weight. The kernel's time is that of all boards over their number. It reads `bits / 8` bytes a
weight and board, and once for all boards 4 of places and 8 of sums, which it writes again. Boards count by
weights of 22 bits. Moves of up to 5.5 cells of a code can be summed in 16 bits; "wide" ones reach further.
A whole merge starts from the
bytes of the updates: "floats" reads and sums them as it was done before changes were whole numbers, and takes
each apart at every reading. Times are those of this process alone, so that other work on the machine counts
for less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.timing import Spread, interleaved, load_average
from fedmpq import kernels
from fedmpq.exchange.messages import TrainingPlan, Update
from fedmpq.exchange.wire import decode_update, encode_update
from fedmpq.kernels.changes import Changes
from fedmpq.method import robust
from fedmpq.method.aggregate import merge_deltas
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import fedmpq
from fedmpq.method.robust import Aggregation, summed, votes, within_majority
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.first_model import ImageFormat, make_first_model
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import PackedLayer, Weights

LAYER_WEIGHTS = (270_000, 2_359_296, 11_200_000)
"""ResNet-20, the largest layer of ResNet-18, and all of ResNet-18."""
BIT_WIDTHS = (2, 4, 8)
TOGETHER = (1, 8)
STEP, WIDE_STEP = 80, 640
"""Of a change, in 4096ths of the distance of codes: at 8 bits it reaches 5 or 40 codes either way."""
WIDE_BITS = 8
MODELS = ("resnet20", "resnet18")
RULES: tuple[Aggregation, ...] = ("mean", "agreement")
BOARDS = 20
BUDGETS = (2.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True)
class KernelResult:
    weights: int
    bits: int
    boards: int
    """Added in one pass."""
    wide: bool
    """Changes reach too far for sums in 16 bits."""
    seconds: Spread
    """For each board."""
    share_of_memcpy: Spread
    """Of its speed: memcpy's time over the kernel's."""

    def as_dict(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "bits": self.bits,
            "boards": self.boards,
            "wide": self.wide,
            "seconds": self.seconds.as_dict(),
            "share_of_memcpy": self.share_of_memcpy.as_dict(),
        }


@dataclass(frozen=True)
class MergeResult:
    model: str
    weights: int
    boards: int
    rule: Aggregation
    seconds: Spread
    """For each update."""
    floats: Spread
    times_faster: Spread

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "weights": self.weights,
            "boards": self.boards,
            "rule": self.rule,
            "seconds_an_update": self.seconds.as_dict(),
            "floats_seconds_an_update": self.floats.as_dict(),
            "times_faster": self.times_faster.as_dict(),
        }


def measure_kernel(
    weights: int, bits: int, boards: int, wide: bool, repetitions: int, seconds_each: float
) -> KernelResult:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, weights, dtype=np.uint8)
    planes = np.stack([kernels.pack_planes(np.roll(codes, board), bits) for board in range(boards)])
    places = random.integers(0, 4096 << bits, weights).astype(np.int32)
    steps = np.full((boards, 1), WIDE_STEP if wide else STEP, np.int32)
    changes = Changes(planes, steps, places, True)
    sums, counted = np.zeros(weights, np.int64), np.arange(boards, dtype=np.int32) * 12_345 + 3_000_001
    source, target = np.zeros(weights, np.float32), np.ones(weights, np.float32)
    jobs = {
        "kernel": lambda: changes.add_to(sums, counted),
        "memcpy": lambda: np.copyto(target, source),
    }
    timings = interleaved(jobs, repetitions, seconds_each, time.process_time)
    each = [seconds / boards for seconds in timings.seconds["kernel"]]
    shares = [copy / kernel for copy, kernel in zip(timings.seconds["memcpy"], each, strict=True)]
    return KernelResult(weights, bits, boards, wide, Spread.of(each), Spread.of(shares))


@dataclass(frozen=True)
class Encoded:
    """Updates as they are stored, each taken apart whenever it is read."""

    graph: Graph
    data: Sequence[bytes]

    def __iter__(self) -> Iterator[Update]:
        return (decode_update(self.graph, each)[1] for each in self.data)


def a_round(name: str, boards: int, rule: Aggregation) -> tuple[QuantizedMethod, GlobalModel, Encoded]:
    """A method of the best profile, its first model, and updates that mostly go one way."""
    recipe = replace(fedmpq("best", TrainingPlan()), aggregation=rule)
    image = ImageFormat(32, 32, 3, 1 / 64, 120)
    graph, weights, side = make_first_model(name, 0, 10, image, recipe.activation_bits)
    method = QuantizedMethod(graph, recipe, 0)
    records = [ClientRecord(n, BUDGETS[n % len(BUDGETS)], 500 + n) for n in range(boards)]
    model = method.start(weights, side, records)
    data = []
    for record in records:
        sent = method.assign(model, record)
        layers = {
            name: _moved(layer, graph.weight_shape(name), record) for name, layer in sent.layers.items()
        }
        update = Update(1, record.client, record.samples, layers, sent.side, loss=1.0, accuracy=0.5)
        data.append(encode_update(graph, "0" * 32, update))
    return method, model, Encoded(graph, data)


def _moved(sent: PackedLayer, shape: tuple[int, ...], record: ClientRecord) -> PackedLayer:
    """A change of some 256ths of a step, half of it common to all boards."""
    size, middle = int(np.prod(shape)), (2**sent.bits - 1) / 2
    common = np.random.default_rng(size).standard_normal(size, np.float32)
    own = np.random.default_rng((record.client, size)).standard_normal(size, np.float32)
    drawn = np.rint((common + own) * np.float32(middle / 3) + np.float32(middle))
    codes = np.clip(drawn, int(sent.bits == 8), 2**sent.bits - 1).astype(np.uint8)
    return PackedLayer(kernels.pack_planes(codes, sent.bits), np.full_like(sent.step, 40))


def merged_in_floats(method: QuantizedMethod, model: GlobalModel, updates: Iterable[Update]) -> Weights:
    """The layers of the next model, summed in float64 in the order of clients, as it was done before."""
    merging, told = method._merging(model), [(update.samples, update.side) for update in updates]
    senders = [
        replace(client, samples=count, dealt=method.deal(model, client))
        for client, (count, _) in zip(model.clients, told, strict=True)
    ]

    def read(names: Sequence[str]) -> Iterator[Weights]:
        for sender, update in zip(senders, updates, strict=True):
            yield merging.change(sender, {name: update.layers[name] for name in names})

    shapes = {node.name: method.graph.weight_shape(node.name) for node in method.graph.layers}
    changes = robust.Changes(shapes, len(senders), read)
    counted = votes(method.recipe.aggregation, merging.weights(senders), changes)
    new = merge_deltas(model.weights, counted.merged(changes))
    sides = [side for _, side in told]
    summed(counted.weights, sides if method.recipe.aggregation == "mean" else within_majority(sides)).mean()
    for _ in updates:
        # The facts of the round were read by themselves.
        pass
    return new


def measure_merge(name: str, boards: int, rule: Aggregation, repetitions: int) -> MergeResult:
    method, model, updates = a_round(name, boards, rule)
    _check(method.merge(model, updates).weights, merged_in_floats(method, model, updates), model.weights)
    jobs = {
        "whole": lambda: method.merge(model, updates),
        "floats": lambda: merged_in_floats(method, model, updates),
    }
    timings = interleaved(jobs, repetitions, 0.0, time.process_time)
    whole, floats = ([each / boards for each in timings.seconds[name]] for name in ("whole", "floats"))
    weights = sum(method.graph.layer_sizes)
    faster = timings.ratio("floats", "whole")
    return MergeResult(name, weights, boards, rule, Spread.of(whole), Spread.of(floats), faster)


def _check(whole: Weights, floats: Weights, before: Weights) -> None:
    """Both must have merged the same: by far less apart than they have moved."""
    for name, weights in before.items():
        moved = float(np.abs(floats[name] - weights).max())
        apart: NDArray[np.float32] = np.abs(whole[name] - floats[name])
        assert float(np.median(apart)) <= 0.01 * moved, f"{name}: {float(np.median(apart))} of {moved}"


def kernel_row(result: KernelResult) -> str:
    share = result.share_of_memcpy
    case = f"{result.bits} wide" if result.wide else str(result.bits)
    head = f"{result.weights:>11,}{case:>8}{result.boards:>8}{result.seconds.median * 1e6:>14,.1f}"
    return f"{head}  {share.median:7.2f} ({share.least:.2f} to {share.greatest:.2f})"


def merge_row(result: MergeResult) -> str:
    def ms(spread: Spread) -> str:
        return f"{spread.median * 1e3:8.2f} ({spread.least * 1e3:.2f} to {spread.greatest * 1e3:.2f})"

    head = f"{result.model:10}{result.rule:11}{result.boards:>6}"
    return f"{head}  {ms(result.seconds):28}{ms(result.floats):30}{result.times_faster.median:6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repetitions", type=int, default=5, help="turns per rival (default %(default)s)")
    parser.add_argument(
        "--kernel-repetitions", type=int, default=25, help="of a kernel, whose turns are short (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.001, help="length of a kernel's turn (default %(default)s)"
    )
    parser.add_argument("--boards", type=int, default=BOARDS, help="in a whole merge (default %(default)s)")
    arguments = parser.parse_args()
    before = load_average()

    def shown(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    shown(f"instruction set {kernels.isa()}, load average before {before}")
    shown("    weights    bits  boards    us a board  of memcpy's speed (least to most)")
    kernel = []
    for weights in LAYER_WEIGHTS:
        for bits, wide in [*((bits, False) for bits in BIT_WIDTHS), (WIDE_BITS, True)]:
            for boards in TOGETHER:
                turns = arguments.kernel_repetitions, arguments.seconds
                kernel.append(measure_kernel(weights, bits, boards, wide, *turns))
                shown(kernel_row(kernel[-1]))
    shown("model     rule       boards  ms an update (least to most)  in floats (least to most)     x faster")
    merges = []
    for name in MODELS:
        for rule in RULES:
            merges.append(measure_merge(name, arguments.boards, rule, arguments.repetitions))
            shown(merge_row(merges[-1]))
    after = load_average()
    shown(f"load average after {after}")
    if arguments.json:
        facts = {"bench": "merge", "isa": kernels.isa(), "repetitions": arguments.repetitions}
        loads = {"load_average_before": before, "load_average_after": after}
        results = {
            "kernel": [each.as_dict() for each in kernel],
            "merges": [each.as_dict() for each in merges],
        }
        print(json.dumps({**facts, **loads, **results}))


if __name__ == "__main__":
    main()
