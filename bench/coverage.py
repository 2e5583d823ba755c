"""Which torchvision classifiers trace, train and export, how small their files are and how fast they run.

Every network goes through three stages, each in a process of its own with limits of time and memory. What a
stage has found is kept in a folder outside the tree, so that a run that was cut goes on where it was;
`--again` measures anew. The table between the markers of docs/models.md is written of all that is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.classifiers import CLASSIFIERS
from bench.coverage_stage import BATCH, STAGES, Facts
from bench.machine import Machine
from bench.memory import ROOT
from bench.pages import measured_on, with_generated
from bench.workload import BUDGET
from fedmpq.system.durable_files import write_durably

PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- begin of what `python -m bench.coverage` writes -->"
END = "<!-- end of what `python -m bench.coverage` writes -->"
MINUTES = 120.0
MEMORY_GB = 12.0


@dataclass(frozen=True)
class Limits:
    """Of one stage of one network."""

    minutes: float = MINUTES
    memory_gb: float = MEMORY_GB


@dataclass(frozen=True)
class Found:
    """What stages have told so far, one file each."""

    folder: Path

    def get(self, name: str, size: int, stage: str) -> Facts | None:
        """None before the stage has been through."""
        path = self._path(name, size, stage)
        facts: Facts | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return facts

    def put(self, name: str, size: int, stage: str, facts: Facts) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._path(name, size, stage), json.dumps(facts).encode(), private=False)

    def _path(self, name: str, size: int, stage: str) -> Path:
        return self.folder / f"{name}-{size}-{stage}.json"


def default_folder() -> Path:
    """In the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "fedmpq" / "coverage"


def measured(name: str, size: int, stage: str, limits: Limits) -> Facts:
    """What a stage says in a process of its own; one that does not come to its end is an error as well."""
    command = [sys.executable, "-m", "bench.coverage_stage", name, str(size), stage]
    command += ["--memory-gb", str(limits.memory_gb)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * limits.minutes)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limits.minutes:g} minutes"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with {done.returncode}: {last}"}
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def go_through(
    sizes: Mapping[str, int], stages: Sequence[str], found: Found, limits: Limits, again: bool
) -> None:
    """Every stage of every network that has not been through; what does not train is not exported."""
    for stage in stages:
        for name, size in sizes.items():
            first = found.get(name, size, "train")
            refused = stage != "train" and first is not None and "error" in first
            if refused or (not again and found.get(name, size, stage) is not None):
                continue
            facts = measured(name, size, stage, limits)
            found.put(name, size, stage, facts)
            print(f"{name} {size} {stage}: {json.dumps(facts)}", flush=True)


def is_whole(facts: Mapping[str, Facts | None]) -> bool:
    """Whether a network has come through every stage."""
    return all(each is not None and "error" not in each for each in facts.values())


def table(sizes: Mapping[str, int], found: Found) -> str:
    """A line for each network, and the words with which the others were refused."""
    lines = [
        "| network | image | parameters | layers | first loss: native, torch | training x torch fp32"
        " | ONNX: size, x torch fp32 | ExecuTorch: size, x torch fp32 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    refusals = []
    whole = 0
    for name, size in sizes.items():
        facts = {stage: found.get(name, size, stage) for stage in STAGES}
        whole += is_whole(facts)
        lines.append(f"| {' | '.join(_cells(name, size, facts))} |")
        refusals += [
            f"- {name}, {stage}: `{each['error']}`"
            for stage, each in facts.items()
            if each is not None and "error" in each
        ]
    told = (
        f"**{whole} of {len(sizes)}** trace, train and export verified to both runtimes.{_load(sizes, found)}"
    )
    return "\n\n".join(part for part in (told, "\n".join(lines), "\n".join(refusals)) if part)


def _load(sizes: Mapping[str, int], found: Found) -> str:
    """How busy the machine was, which speeds depend on."""
    stages = [found.get(name, size, stage) for name, size in sizes.items() for stage in STAGES]
    loads = [each["load_average"] for each in stages if each is not None and "load_average" in each]
    if not loads:
        return ""
    return f" The machine's load average was {min(loads):.1f} to {max(loads):.1f} meanwhile."


def _cells(name: str, size: int, facts: Mapping[str, Facts | None]) -> list[str]:
    trained = facts["train"]
    head = [f"`{name}`", str(size)]
    if trained is None or "error" in trained:
        return [*head, "", "", "" if trained is None else "refused", "", "", ""]
    return [
        *head,
        f"{trained['parameters']:,}",
        str(trained["layers"]),
        f"{trained['native_loss']:.4f}, {trained['torch_loss']:.4f}",
        f"{trained['speedup']:.2f}",
        *(_file_cell(facts[stage], trained["parameters"]) for stage in ("onnx", "executorch")),
    ]


def _file_cell(facts: Facts | None, parameters: int) -> str:
    if facts is None:
        return "not tried"
    if "error" in facts:
        return "no"
    return f"{facts['file_bytes'] / (4 * parameters):.1%}, {facts['speedup']:.2f}"


def explained() -> str:
    """What the numbers of the table are."""
    return (
        f"{measured_on(Machine.here())} Untrained networks of 10 classes with the bit-widths of a client of"
        f" {BUDGET} bits per weight, one thread, rivals taking turns. *First loss*: of the first step on"
        f" random images, batch {BATCH}, on both engines. *Training*: seconds of a step of torch fp32 over"
        f" those of the native engine, batch {BATCH}. *Size*: of the file, against four bytes a parameter."
        " *x torch fp32*: one image through the file, against eager torch in fp32. A file is there because"
        " its own runtime computes it to the bit."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage", description=__doc__)
    parser.add_argument("--only", action="append", choices=CLASSIFIERS, help="measure this one; repeatable")
    parser.add_argument("--stage", action="append", choices=STAGES, help="this stage alone; repeatable")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--size", type=int, help="side of the images in pixels (default: 64, where that goes)")
    sizes.add_argument("--standard", action="store_true", help="images of 224 pixels, 299 for inception_v3")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="limit of a stage (default %(default)s)"
    )
    parser.add_argument("--memory-gb", type=float, default=MEMORY_GB, help="likewise (default %(default)s)")
    parser.add_argument("--cache", type=Path, default=default_folder(), help="default %(default)s")
    parser.add_argument("--again", action="store_true", help="measure what is kept anew")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write into")
    return parser


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    def size(name: str) -> int:
        classifier = CLASSIFIERS[name]
        return arguments.size or (classifier.standard if arguments.standard else classifier.small)

    return {name: size(name) for name in CLASSIFIERS}


def main(words: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    page = arguments.page.read_text(encoding="utf-8")
    sizes, found = _sizes(arguments), Found(arguments.cache)
    chosen: dict[str, Any] = {name: sizes[name] for name in arguments.only or sizes}
    limits = Limits(arguments.minutes, arguments.memory_gb)
    go_through(chosen, arguments.stage or tuple(STAGES), found, limits, arguments.again)
    generated = f"{explained()}\n\n{table(sizes, found)}"
    arguments.page.write_text(with_generated(page, generated, BEGIN, END), encoding="utf-8")
    print(f"written to {arguments.page}")


if __name__ == "__main__":
    main()
