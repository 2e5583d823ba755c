"""Every measurement of docs/performance.md: prints the tables and writes them between the page's markers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import arm_steps, federation, goals, inference, planes, real_boards, scaling, train_step
from bench.machine import Machine, cores_in_use
from bench.memory import ROOT
from bench.pages import measured_on, with_generated
from bench.real_boards import Boards
from bench.scaling import Scaling
from bench.timing import load_average
from bench.train_step import Case
from bench.workload import BATCHES, MODELS
from fedmpq import kernels
from tools.arm_board import BoardError
from tools.wheels import WheelError

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin of what `make bench` writes -->", "<!-- end of what `make bench` writes -->"
# What makes torch and its libraries use no more than an instruction set.
TORCH_LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
}

INFERENCE_MODELS, INFERENCE_BITS, INFERENCE_TURNS = ("resnet20", "mobilenet_v2"), 4.0, 15

Facts = dict[str, Any]
"""What `python -m bench.train_step --json` prints."""


def step_facts(repetitions: int) -> Iterator[Facts]:
    """Every model and batch with one thread; then ResNet-20 on all cores, and on lesser instruction sets."""
    print(f"\ntorch on {train_step.torch_isa()}, load average before {load_average()}\n{train_step.HEADER}")
    best = kernels.isa()
    for model in MODELS:
        for batch in BATCHES:
            yield _printed(Case(model, batch, repetitions=repetitions))
    cores = Machine.here().cores
    if cores > 1:
        yield _printed(Case("resnet20", 64, threads=cores, repetitions=repetitions))
    for isa in kernels.supported_isas():
        if isa in (best, "scalar"):
            continue
        kernels.force_isa(isa)
        yield _printed(Case("resnet20", 64, repetitions=repetitions))
        kernels.force_isa(best)
        if isa in TORCH_LIMITS:
            yield _limited(isa, repetitions)


def _printed(case: Case) -> Facts:
    result = train_step.measure(case)
    print(train_step.row(result), flush=True)
    return result.as_dict()


def _limited(isa: str, repetitions: int) -> Facts:
    """Both on `isa`: torch reads its limits when it starts, so in a new process."""
    command = [
        sys.executable,
        "-m",
        "bench.train_step",
        "--isa",
        isa,
        "--repetitions",
        str(repetitions),
        "--json",
    ]
    environment = {**os.environ, **TORCH_LIMITS[isa]}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    facts: Facts = json.loads(done.stdout)
    print(
        f"the same with torch on {facts['torch_isa']}: x torch fp32 {facts['speedup_vs_torch_fp32']:.2f}",
        flush=True,
    )
    return facts


def plane_results(repetitions: int) -> list[planes.Result]:
    print("job         weights bits  kernel us  x memcpy (least to most)  NumPy x kernel (least to most)")
    results = []
    for bits in planes.BIT_WIDTHS:
        for result in planes.measure(planes.RESNET20_WEIGHTS, bits, repetitions, seconds_each=0.01):
            print(planes.row(result), flush=True)
            results.append(result)
    return results


def federation_facts() -> Facts:
    facts = federation.measure(federation.Case()).as_dict()
    print(f"\n{federation.table(facts)}", flush=True)
    return facts


def inference_facts() -> list[Facts]:
    found = []
    for model in INFERENCE_MODELS:
        found.append(inference.facts_of(model, INFERENCE_BITS, INFERENCE_TURNS))
        print(f"\n{inference.table(found[-1])}", flush=True)
    return found


def threads_scaling() -> Scaling | None:
    """Of ResNet-20 on all cores, if there are several."""
    cores = Machine.here().cores
    if cores < 2:
        return None
    found = scaling.measure(Case("resnet20", 64, threads=cores))
    print(f"\n{found.lines()}", flush=True)
    return found


def board_facts() -> Boards:
    found = real_boards.measure()
    print(f"\n{real_boards.table(found)}", flush=True)
    return found


def arm_ratios() -> dict[str, arm_steps.Ratio] | str:
    """By board; or why there are none."""
    try:
        found = arm_steps.measure("mobilenet_v2", 16, goals.INSTRUCTION_GOALS)
    except (BoardError, WheelError) as error:
        print(f"\nno counts on ARM boards: {error}", flush=True)
        return str(error).splitlines()[0]
    for cpu, ratio in found.items():
        print(
            f"{cpu}: {ratio.scalar:.1f} million instructions, own {ratio.own:.1f}, {ratio.library:.1f}x",
            flush=True,
        )
    return found


def described(machine: Machine, used: float, loads: tuple[float, float]) -> str:
    """`used`: how many cores other work kept before; `loads`: the load average before and after."""
    warning = (
        " **The machine was busy with other work: the figures say little, those of several threads least.**"
    )
    return (
        f"{measured_on(machine)} Other work kept {used:g} of its cores busy before. Load average {loads[0]}"
        f" before, {loads[1]} after.{warning if machine.is_busy(used) else ''}"
    )


def step_table(results: list[Facts]) -> str:
    lines = [
        "| model | image | batch | threads | kernels | torch on | ms a step | x torch fp32 (least to most)"
        " | x QAT | x torch engine | memory MB | torch MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for facts in results:
        spread = facts["spreads"]["speedup_vs_torch_fp32"]
        cells = (
            facts["model"],
            f"{facts['image'][1]}x{facts['image'][2]}",
            facts["batch"],
            facts["threads"],
            facts["isa"],
            facts["torch_isa"],
            f"{facts['seconds']['native']['median'] * 1e3:.1f}",
            f"**{spread['median']:.2f}** ({spread['least']:.2f} to {spread['greatest']:.2f})",
            f"{facts['speedup_vs_qat']:.2f}",
            f"{facts['speedup_vs_torch_engine']:.2f}",
            f"{facts['memory_growth_mb']:.1f}",
            f"{facts['torch_memory_growth_mb']:.1f}",
        )
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def plane_table(results: list[planes.Result]) -> str:
    lines = ["| planes of 270,000 weights | bits | us | x memcpy | NumPy x kernel |", "|---|---|---|---|---|"]
    for result in results:
        ratios = f"{result.times_memcpy.median:.2f} | {result.numpy_times_kernel.median:.1f}"
        lines.append(f"| {result.job} | {result.bits} | {result.seconds.median * 1e6:.1f} | {ratios} |")
    return "\n".join(lines)


def federation_table(facts: Facts) -> str:
    lines = [
        f"A round of {facts['clients']} clients that train nothing, {facts['model']}"
        f" ({facts['parameters']:,} numbers), {facts['budget']} bits per weight; Flower"
        f" {facts['flwr_version'] or 'was not installed'}. Turns of each: {facts['repetitions']}, of"
        f" {facts['rounds']} rounds. The server's memory peaks at {facts['server_peak_mb']:.0f} MB.",
        "",
        "| | FedMPQ (least to most) | Flower (least to most) | Flower / FedMPQ |",
        "|---|---|---|---|",
    ]
    for title, key, scale, form in federation.MEASURES:
        own, theirs = (_spread_cell(facts["spreads"][name], scale, form) for name in (key, f"flwr_{key}"))
        ratio = f"**{federation.times_flower(facts, key):.1f}**" if theirs else ""
        lines.append(f"| {title} | {own} | {theirs} | {ratio} |")
    return "\n".join(lines)


def _spread_cell(spread: dict[str, float] | None, scale: float, form: str) -> str:
    if spread is None:
        return ""
    median, least, greatest = (spread[name] * scale for name in ("median", "least", "greatest"))
    return f"{median:{form}} ({least:{form}} to {greatest:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.performance", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="turns per rival (default %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write into")
    arguments = parser.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    used, before = cores_in_use(), load_average()
    plane_rows = plane_results(arguments.repetitions)
    steps = list(step_facts(arguments.repetitions))
    threads = threads_scaling()
    rounds = federation_facts()
    models = inference_facts()
    boards, after = board_facts(), load_average()
    parts = [
        described(Machine.here(), used, (before[0], after[0])),
        goals.table(list(goals.goals(steps, threads, models, boards, arm_ratios()))),
        step_table(steps),
        "" if threads is None else threads.lines(),
        f"Bits per weight of ResNet-20: {steps[0]['bits']}. Update rule: {steps[0]['update']}."
        f" Turns of each rival: {arguments.repetitions}.",
        plane_table(plane_rows),
        federation_table(rounds),
        *(f"```\n{inference.table(facts)}\n```" for facts in models),
    ]
    generated = "\n\n".join(part for part in parts if part)
    arguments.page.write_text(with_generated(page, generated, BEGIN, END), encoding="utf-8")
    print(f"written to {arguments.page}")


if __name__ == "__main__":
    main()
