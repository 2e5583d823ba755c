"""One training step (forward, backward, update) of the native engine against torch, and the memory it takes.

Rivals: torch fp32 (eager, channels_last); the same with fake quantization (weights rounded to 8 bits and
activations to 4 by torch.fake_quantize_per_tensor_affine, straight-through gradients, no observers); and
this project's torch engine. SGD with momentum 0.9 and weight decay 5e-4 throughout. The native engine takes
turns with each rival; a speed-up is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from bench import torch_rivals
from bench.machine import Machine, warn_if_busy
from bench.memory import Growth, growths
from bench.step_profile import profile
from bench.timing import Spread, Timings, interleaved, load_average
from bench.workload import BATCHES, MODELS, Train, Workload, engine_trainer, make_workload
from fedmpq import kernels
from fedmpq.exchange.messages import UpdateRule
from fedmpq.kernels.tensors import MAX_THREADS
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.torch_engine import TorchEngine

TURN_SECONDS = 0.2
PROFILED_STEPS = 10


@dataclass(frozen=True)
class Case:
    """What to measure."""

    model: str
    batch: int
    threads: int = 1
    update: UpdateRule = "paper"
    repetitions: int = 7


@dataclass(frozen=True)
class Result:
    case: Case
    isa: str
    torch_isa: str
    bits: str
    image: tuple[int, ...]
    seconds: Mapping[str, Spread]
    speedups: Mapping[str, Spread]
    """The rival's time / the native engine's."""
    memory: Mapping[str, Growth]
    load_before: list[float]
    load_after: list[float]

    def as_dict(self) -> dict[str, Any]:
        native, torch_fp32 = self.memory["native"], self.memory["torch"]
        spreads = {f"speedup_vs_{name}": spread for name, spread in self.speedups.items()}
        return {
            **{
                name: getattr(self.case, name)
                for name in ("model", "batch", "threads", "update", "repetitions")
            },
            "image": self.image,
            "bits": self.bits,
            "isa": self.isa,
            "torch_isa": self.torch_isa,
            **{name: round(spread.median, 3) for name, spread in spreads.items()},
            "memory_growth_mb": native.growth_mb,
            "memory_library_mb": native.library_mb,
            "memory_peak_mb": native.peak_mb,
            "torch_memory_growth_mb": torch_fp32.growth_mb,
            "torch_memory_library_mb": torch_fp32.library_mb,
            "torch_memory_peak_mb": torch_fp32.peak_mb,
            "spreads": {name: spread.as_dict() for name, spread in spreads.items()},
            "seconds": {name: spread.as_dict() for name, spread in self.seconds.items()},
            "load_average_before": self.load_before,
            "load_average_after": self.load_after,
        }


def measure(case: Case) -> Result:
    before = load_average()
    torch.set_num_threads(case.threads)
    work = make_workload(case.model, case.batch)
    native = native_trainer(work, case)
    seconds: dict[str, Spread] = {}
    speedups: dict[str, Spread] = {}
    for name, make in rivals(work, case.update).items():
        timings = paired({"native": native, name: make()}, case.repetitions)
        seconds.setdefault("native", timings.time("native"))
        seconds[name], speedups[name] = timings.time(name), timings.ratio(name, "native")
    return Result(
        case=case,
        isa=kernels.isa(),
        torch_isa=torch_isa(),
        bits=work.bits,
        image=work.graph.input.shape,
        seconds=seconds,
        speedups=speedups,
        memory=growths(work, case.threads, kernels.isa(), case.update),
        load_before=before,
        load_after=load_average(),
    )


def native_trainer(work: Workload, case: Case, threads: int | None = None) -> Train:
    return engine_trainer(NativeEngine(threads or case.threads), work, case.update)


def rivals(work: Workload, update: UpdateRule) -> dict[str, Callable[[], Train]]:
    """Made when their turn comes, so that no more than one is in memory."""

    def fp32() -> Train:
        return torch_rivals.trainer(torch_rivals.float_module(work), torch_rivals.float_batches(work))

    def fake_quantized() -> Train:
        module = torch_rivals.fake_quantized(torch_rivals.float_module(work))
        return torch_rivals.trainer(module, torch_rivals.float_batches(work))

    return {
        "torch_fp32": fp32,
        "qat": fake_quantized,
        "torch_engine": lambda: engine_trainer(TorchEngine(), work, update),
    }


def paired(trainers: Mapping[str, Train], repetitions: int) -> Timings:
    """Seconds per step; turns of about `TURN_SECONDS`, or of one step where that takes longer."""
    steps = {name: _steps_filling(train, TURN_SECONDS) for name, train in trainers.items()}
    # A turn is one call of many steps, so that what an engine does once an epoch is not done once a step.
    turns = {name: partial(train, steps[name]) for name, train in trainers.items()}
    timings = interleaved(turns, repetitions, seconds_each=0.0)
    return Timings({name: [turn / steps[name] for turn in timings.seconds[name]] for name in trainers})


def _steps_filling(train: Train, seconds: float) -> int:
    train(1)  # pages, caches and code made on the first use
    steps = 1
    while True:
        start = time.perf_counter()
        train(steps)
        taken = time.perf_counter() - start
        if taken >= seconds / 2:
            return max(1, round(steps * seconds / taken))
        steps *= 2


def torch_isa() -> str:
    """What ATen runs, and the limit set for oneDNN, if any."""
    limit = os.environ.get("DNNL_MAX_CPU_ISA") or os.environ.get("ONEDNN_MAX_CPU_ISA")
    own = torch.backends.cpu.get_cpu_capability().lower()
    return f"{own}, oneDNN up to {limit.lower()}" if limit else own


def print_profiles(cases: Iterator[Case]) -> None:
    for case in cases:
        found = profile(make_workload(case.model, case.batch), case.update, case.threads, PROFILED_STEPS)
        print(f"{case.model}, batch {case.batch}, {kernels.isa()}, load average {load_average()}")
        print("\n".join(found.lines()), flush=True)


HEADER = (
    f"{'model':19}{'batch':>6}{'threads':>8}  {'isa':8}{'ms/step':>9}   x torch fp32 (least to most)"
    "   x QAT   x torch engine   memory MB (torch)"
)


def row(result: Result) -> str:
    case, fp32 = result.case, result.speedups["torch_fp32"]
    others = f"{result.speedups['qat'].median:8.2f}{result.speedups['torch_engine'].median:17.2f}"
    memory = f"{result.memory['native'].growth_mb:12.1f} ({result.memory['torch'].growth_mb:.1f})"
    milliseconds = f"{result.seconds['native'].median * 1e3:9.1f}"
    head = f"{case.model:19}{case.batch:6}{case.threads:8}  {result.isa:8}{milliseconds}"
    ratio = f"{fp32.median:8.2f} ({fp32.least:.2f} to {fp32.greatest:.2f})"
    return f"{head}  {ratio:30}{others}{memory}"


def as_object(results: list[Result]) -> dict[str, Any]:
    """One case's facts side by side; those of several in a list."""
    facts = {"bench": "train_step", **Machine.here().as_dict()}
    if len(results) == 1:
        return {**facts, **results[0].as_dict()}
    return {**facts, "results": [result.as_dict() for result in results]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.train_step", description=__doc__)
    parser.add_argument("--model", choices=(*MODELS, "all"), default="resnet20", help="default %(default)s")
    batches = (*(str(batch) for batch in BATCHES), "all")
    parser.add_argument("--batch", choices=batches, default="64", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of every rival (default %(default)s)")
    parser.add_argument(
        "--isa", choices=kernels.supported_isas(), help="of the native engine; default: the best"
    )
    parser.add_argument("--update", choices=get_args(UpdateRule), default="paper", help="default %(default)s")
    parser.add_argument("--repetitions", type=int, default=7, help="turns per rival (default %(default)s)")
    parser.add_argument(
        "--profile", action="store_true", help="show where a step's time goes instead, without rivals"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    models = MODELS if arguments.model == "all" else (arguments.model,)
    batches = BATCHES if arguments.batch == "all" else (int(arguments.batch),)
    common = arguments.threads, arguments.update, arguments.repetitions
    return (Case(model, batch, *common) for model in models for batch in batches)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.threads <= MAX_THREADS:
        parser.error(f"--threads {arguments.threads} is outside 1..{MAX_THREADS}")
    if arguments.repetitions < 1:
        parser.error(f"--repetitions {arguments.repetitions} is too few; the least is 1")
    if arguments.profile and arguments.json:
        parser.error("--profile prints tables: leave --json out")


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    _check(parser, arguments)
    if arguments.isa:
        kernels.force_isa(arguments.isa)
    if arguments.profile:
        return print_profiles(_cases(arguments))
    results = []
    warn_if_busy()
    if not arguments.json:
        print(f"torch on {torch_isa()}, load average before {load_average()}\n{HEADER}", flush=True)
    for case in _cases(arguments):
        results.append(measure(case))
        if not arguments.json:
            print(row(results[-1]), flush=True)
    print(json.dumps(as_object(results)) if arguments.json else f"load average after {load_average()}")


if __name__ == "__main__":
    main()
