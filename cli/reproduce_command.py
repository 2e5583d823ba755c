"""`fedmpq reproduce`: the paper's tables and its figure, on this system."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedmpq.data.open_source import load
from fedmpq.lab import scales, tables_report
from fedmpq.lab.cells import Cell, Clock, Slots, Status, cell_bytes, free_memory, run_cells, slots_for
from fedmpq.lab.experiment import PAPER_BUDGETS, Experiment, ExperimentError
from fedmpq.lab.first_model import make_graph
from fedmpq.lab.paper_tables import TABLES, DataSet, Line, Table, narrowed
from fedmpq.lab.report import Summary
from fedmpq.lab.scales import DEFAULT_SCALE, SCALE_NAMES, TAIL, Scale
from fedmpq.lab.stored_data import StoredData, store_data
from fedmpq.lab.tables_report import Score, Scores
from fedmpq.lab.workers import default_workers
from fedmpq.system.durable_files import write_durably

N = TypeVar("N", int, float)

EPILOG = """examples:
  fedmpq reproduce table1 --data cifar10/
  fedmpq reproduce table1 --data cifar10/ cifar100:DIR tiny-imagenet-200/ --scale paper
  fedmpq reproduce table4 --data cifar10/ --seeds 0
  fedmpq reproduce table1 --data cifar10/ --only fp32,fedmpq,best --alpha 0.5

Scale mid is all images at 16x16, 20 rounds of 5 local epochs; paper is the
paper's own setting. --only also takes rows that the paper has not: best,
fpq8best (FPQ8 in the profile best), fp32-0.03, fp32-0.01 (FP32 at other
learning rates) and fp32same (FP32 with best's averaging, schedule, calibration
and losses).

A data set is told by its number of classes. The folder --out gets cells/ (a
simulation's folder each), data/, and for each table .md, .csv, .json and
.png. The same command goes on where it was stopped; tables share what they
have in common when they share --out."""

CELL_SETTINGS = (
    "prune_density",
    "lasso",
    "learning_rate",
    "code_learning_rate",
    "logit_adjustment",
    "momentum_bits",
    "deal",
    "step_rule",
    "merge",
    "per_channel",
    "first_clips",
    "averaging",
    "statistics",
    "schedule",
    "warmup",
)
"""In what cells of a scale may differ besides method, skew, epochs, clients and seed."""
ON_CTRL_C = 130
UNBOUNDED_WIDTH = 200


@dataclass(frozen=True)
class Plan:
    """A table with its cells: everything decided, nothing run."""

    table: Table
    data: StoredData
    common: dict[str, Any]
    cells: dict[tuple[str, str, int], Cell]
    """By row, column and seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Run the paper's tables, or its figure of local epochs, at a scale of your choice."
    parser.epilog = EPILOG
    parser.add_argument(
        "table",
        choices=tuple(TABLES),
        help="which table; epochs is the figure, best the parts of our profile",
    )
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="DIR", help="the data sets, as fedmpq simulate takes them"
    )
    parser.add_argument(
        "--scale", choices=SCALE_NAMES, default=DEFAULT_SCALE, help=f"(default: {DEFAULT_SCALE})"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=None, help="more or fewer rounds than the scale's"
    )
    parser.add_argument(
        "--seeds", type=_list_of(int), default=(0, 1, 2), metavar="LIST", help="(default: 0,1,2)"
    )
    parser.add_argument(
        "--only", type=_words, default=(), metavar="LIST", help="rows such as fedmpq,aqfl,best"
    )
    parser.add_argument(
        "--alpha", type=_list_of(float), default=(), metavar="LIST", help="label skew (default: the paper's)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", default=None, help="processes that train (default: one a core)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=None, help="folder (default: runs/reproduce-SCALE)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line, instead of text")


def run_command(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command; errors in the input are the caller's to print."""
    console = _console(arguments.json)
    out: Path = arguments.out or Path("runs") / f"reproduce-{arguments.scale}"
    if arguments.workers is not None and arguments.workers < 1:
        raise ExperimentError(f"--workers {arguments.workers} is too small; the least is 1")
    scale = scales.SCALES[arguments.scale]
    if arguments.rounds is not None:
        scale = scale.with_rounds(arguments.rounds)
    plans = [make_plan(arguments, scale, spec, out) for spec in dict.fromkeys(arguments.data)]
    for plan in plans:
        _say(console, f"{plan.table.title}, scale {scale.name}", style="bold")
        for line in _settings_lines(plan, scale):
            _say(console, f"  {line}")
    try:
        failures = _run(plans, arguments, scale, out, console)
    except KeyboardInterrupt:
        _say(console, "stopped; every finished round is saved; the same command goes on from there")
        return ON_CTRL_C
    for plan in plans:
        scores = _scores(plan)
        _write(plan, scale, scores, arguments, out)
        picture = out / f"{_stem(plan, arguments)}.png"
        tables_report.plot(plan.table, scores, f"scale {scale.name}, {_seeds_note(arguments.seeds)}", picture)
        _show(plan, scores, out, arguments, console)
    for name, failure in failures.items():
        _say(console, f"failed: {name}: {failure}", style="red")
    return 1 if failures else 0


def make_plan(arguments: argparse.Namespace, scale: Scale, spec: str, out: Path) -> Plan:
    """Load the data and name every cell, so that a mistake shows before the first one runs."""
    data = store_data(spec, scale, out / "data")
    table = TABLES[arguments.table](data.data_set, arguments.alpha, scale.local_epochs)
    if arguments.only:
        table = narrowed(table, arguments.only)
    common = scale.experiment_settings(data.data_set)
    own_rounds = scales.SCALES[scale.name].cut.rounds
    cells: dict[tuple[str, str, int], Cell] = {}
    # Seed by seed, so that a table broken off early has all its cells and not all of a cell's seeds.
    for seed in dict.fromkeys(arguments.seeds):
        for row, column in table.cells():
            experiment = table.experiment(row, column, common, str(data.path), seed)
            cell = Cell(experiment, out / "cells" / cell_name(data.data_set, experiment, own_rounds))
            cell.results()
            cells[row.key, column.key, seed] = cell
    return Plan(table, data, common, cells)


def cell_name(data_set: DataSet, experiment: Experiment, scale_rounds: int) -> str:
    """A folder's name, the same in whatever table the cell stands: what differs between cells of a scale."""
    paper = Experiment("")
    parts = [data_set.key, experiment.label, f"alpha{experiment.alpha:g}", f"epochs{experiment.epochs}"]
    if experiment.rounds != scale_rounds:
        parts.append(f"rounds{experiment.rounds}")
    if experiment.clients != len(PAPER_BUDGETS):
        parts.append(f"clients{experiment.clients}")
    for name in CELL_SETTINGS:
        value = getattr(experiment, name)
        if value != getattr(paper, name):
            parts.append(
                f"{name.replace('_', '-')}{value:g}" if isinstance(value, float) else f"{name}-{value}"
            )
    return "-".join([*parts, f"seed{experiment.seed}"])


def _run(
    plans: Sequence[Plan], arguments: argparse.Namespace, scale: Scale, out: Path, console: Console
) -> dict[str, str]:
    """Run what is not finished; the failures by the folder's name."""
    cells = list(dict.fromkeys(cell for plan in plans for cell in plan.cells.values()))
    left = [cell for cell in cells if cell.finished_results() is None]
    failures: dict[str, str] = {}
    if not left:
        _say(console, f"all {len(cells)} cells were finished before")
        return failures
    slots = _slots(plans, len(left), arguments.workers or default_workers())
    clock = Clock(left, slots)
    for cell in cells:
        if results := cell.finished_results():
            clock.add(cell, results)
    _say(
        console,
        f"{len(left)} of {len(cells)} cells to run, {slots.cells} at a time, {slots.workers} workers in all",
    )
    with _display(left, clock, console) as show:

        def watch(status: Status) -> None:
            show(status)
            if (ended := status.ended) is None:
                return
            if ended.failure is not None:
                failures[ended.cell.folder.name] = ended.failure
            else:
                clock.add(ended.cell, ended.cell.results())
            _tell(ended.cell, ended.failure, left, clock, arguments, console)
            for plan in plans:
                _write(plan, scale, _scores(plan), arguments, out)

        run_cells(left, slots, watch)
    return failures


def _slots(plans: Sequence[Plan], cells: int, workers: int) -> Slots:
    needed = 0
    for plan in plans:
        experiment = next(iter(plan.cells.values())).experiment
        train = load(plan.data.path, "train")
        layers = len(make_graph(experiment, train).layers)
        needed = max(needed, cell_bytes(plan.data.side, layers, experiment.batch_size))
    return slots_for(cells, workers, needed, free_memory())


@contextmanager
def _display(left: Sequence[Cell], clock: Clock, console: Console) -> Iterator[Callable[[Status], None]]:
    """A bar over all rounds of all cells, with the time left; only on a terminal."""
    total = sum(cell.experiment.rounds for cell in left)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total, eta="")

        def show(status: Status) -> None:
            if not console.is_terminal:
                return
            done = sum(cell.rounds_done for cell in left)
            now = ", ".join(
                f"{c.folder.name} {c.rounds_done}/{c.experiment.rounds}" for c in status.running[:2]
            )
            more = f" and {len(status.running) - 2} more" if len(status.running) > 2 else ""
            bar.update(task, completed=done, description=now + more, eta=_time_left(clock))

        yield show


def _tell(
    cell: Cell,
    failure: str | None,
    left: Sequence[Cell],
    clock: Clock,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """One line, or one JSON object, for a cell that ended."""
    done = sum(cell.rounds_done == cell.experiment.rounds for cell in left)
    summary = None if failure is not None else Summary.of(cell.results(), TAIL)
    if arguments.json:
        outcome = {"failure": failure} if summary is None else asdict(summary)
        _print_json({"type": "cell", "cell": cell.folder.name, "done": done, "of": len(left), **outcome})
        return
    text = failure or ""
    if summary is not None:
        text = f"deployed {100 * summary.mean_deployed:.1f}  W {100 * summary.accuracy:.1f}"
    _say(console, f"[{done}/{len(left)}] {cell.folder.name}: {text}  {_time_left(clock)}".rstrip())


def _time_left(clock: Clock) -> str:
    seconds = clock.seconds_left()
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes >= 120:
        return f"about {round(minutes / 60)} h left"
    return f"about {minutes} min left" if minutes else f"about {round(seconds)} s left"


def _scores(plan: Plan) -> Scores:
    """Of the cells with a finished seed at least."""
    summaries: dict[tuple[str, str], dict[int, Summary]] = {}
    for (row, column, seed), cell in plan.cells.items():
        if results := cell.finished_results():
            summaries.setdefault((row, column), {})[seed] = Summary.of(results, TAIL)
    rows: dict[str, Line] = {row.key: row for row in plan.table.rows}
    return {key: Score.of(runs, rows[key[0]].trains_in_float) for key, runs in summaries.items()}


def _write(plan: Plan, scale: Scale, scores: Scores, arguments: argparse.Namespace, out: Path) -> None:
    """The table as Markdown and CSV, and its settings; whole files, replaced."""
    stem, table = _stem(plan, arguments), plan.table
    settings = "\n".join(f"- {line}" for line in _settings_lines(plan, scale))
    parts = [
        f"# {table.title}: scale {scale.name}",
        f"    {_command(arguments)}",
        f"{settings}\n- {_score_note(arguments.seeds)}",
        tables_report.markdown(table, scores).rstrip(),
        tables_report.budgets_markdown(table, scores).rstrip(),
        f"![{table.title}]({stem}.png)",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    write_durably(out / f"{stem}.md", text.encode(), private=False)
    write_durably(out / f"{stem}.csv", tables_report.csv_text(table, scores).encode(), private=False)
    record = {
        "fedmpq": version("fedmpq"),
        "command": _command(arguments),
        "scale": scale.name,
        "tail": TAIL,
        "seeds": list(arguments.seeds),
        "common_settings": plan.common,
        "train_images": plan.data.train_images,
        "test_images": plan.data.test_images,
        "cells": {f"{r}, {c}, seed {s}": cell.experiment.to_dict() for (r, c, s), cell in plan.cells.items()},
    }
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_durably(out / f"{stem}.json", text.encode(), private=False)


def _stem(plan: Plan, arguments: argparse.Namespace) -> str:
    """What the table's files are called, without their suffixes. A part does not replace the whole."""
    parts = [plan.table.file_stem]
    if arguments.rounds is not None:
        parts.append(f"rounds{arguments.rounds}")
    if arguments.alpha:
        parts.append("alpha" + ",".join(f"{alpha:g}" for alpha in arguments.alpha))
    if arguments.only:
        parts.append(",".join(row.key for row in plan.table.rows))
    return "-".join(parts)


def _settings_lines(plan: Plan, scale: Scale) -> list[str]:
    data = plan.data
    lines = scales.describe(scale, data.data_set, data.train_images, data.test_images, data.side)
    if data.skipped:
        lines.append(f"{data.skipped} images of the set could not be read and are left out")
    return lines


def _seeds_note(seeds: Sequence[int]) -> str:
    return f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"


def _score_note(seeds: Sequence[int]) -> str:
    spread = "; mean of the seeds, ± half the span between them" if len(seeds) > 1 else ""
    return (
        f"top-1 test accuracy in % after the last round, {_seeds_note(seeds)}{spread}. "
        "Deployed: the integer models that devices run, mean over all clients. W: the global model in full "
        "precision"
    )


def _command(arguments: argparse.Namespace) -> str:
    """What makes the table again; a data set by the last part of its path."""
    names = [
        spec if ":" in spec else f"{Path(spec).name}{'/' * Path(spec).is_dir()}" for spec in arguments.data
    ]
    words = ["fedmpq", "reproduce", arguments.table, "--data", *names, "--scale", arguments.scale]
    if arguments.rounds is not None:
        words += ["--rounds", str(arguments.rounds)]
    words += ["--seeds", ",".join(map(str, arguments.seeds))]
    if arguments.only:
        words += ["--only", ",".join(arguments.only)]
    if arguments.alpha:
        words += ["--alpha", ",".join(f"{alpha:g}" for alpha in arguments.alpha)]
    return shlex.join(words)


def _show(plan: Plan, scores: Scores, out: Path, arguments: argparse.Namespace, console: Console) -> None:
    stem = out / _stem(plan, arguments)
    if arguments.json:
        cells = {f"{row}, {column}": asdict(score) for (row, column), score in scores.items()}
        _print_json(
            {"type": "table", "table": plan.table.name, "data_set": plan.data.data_set.key, "cells": cells}
        )
    else:
        _say(console, f"\n{tables_report.markdown(plan.table, scores)}")
    _say(console, f"written: {stem}.md, .csv, .json and .png")


def _console(json_on_stdout: bool) -> Console:
    """Text for a person: on standard error where standard output is for a program."""
    stream = sys.stderr if json_on_stdout else sys.stdout
    width = None if stream.isatty() else UNBOUNDED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, soft_wrap=True)


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, allow_nan=False), flush=True)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _list_of(kind: Callable[[str], N]) -> Callable[[str], tuple[N, ...]]:
    def parse(text: str) -> tuple[N, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1,2") from None

    return parse
