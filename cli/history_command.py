"""`fedmpq history`: what a run did, round by round, of a server or of a simulation."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.table import Table

from fedmpq.method.history import History, Outcome
from fedmpq.model.metrics import Metric, metric_named
from fedmpq.server.state_folder import StateFolder, add_state_argument
from fedmpq.server.status_report import console
from fedmpq.server.status_text import bytes_text, plain
from fedmpq.server.stored_run import read_graph, read_history
from fedmpq.system.durable_files import write_durably

FORMATS = ("table", "clients", "csv", "jsonl", "png")
_MARKS: dict[Outcome, str] = {"trained": "T", "late": "L", "rejected": "R", "declined": "D"}


class HistoryError(ValueError):
    """No run to show, or a form that it cannot be shown in."""


@dataclass(frozen=True)
class Told:
    """A run's history, and what a picture of it needs."""

    name: str
    history: History
    layer_names: Callable[[], list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a run did, round by round: accuracy, or its task's metric, by budget, loss, bytes, "
        "seconds, and what became of each client. The server need not run."
    )
    parser.epilog = (
        "examples:\n"
        "  fedmpq history                         the newest run of the server in ./fedmpq-server\n"
        "  fedmpq history garden --format clients which board trained, came late or was rejected, and why\n"
        "  fedmpq history runs/fedmpq-best-0 --format csv -o rounds.csv    of a simulation\n"
        "  fedmpq history garden --format png -o garden.png"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_run_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, default="table", help="(default: table)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of standard output")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Of which run; `told_of` takes them."""
    parser.add_argument(
        "run",
        nargs="?",
        help="name or id of a server's run (default: the newest), or a simulation's folder",
    )
    add_state_argument(parser)


def run_command(arguments: argparse.Namespace) -> int:
    told = told_of(arguments.run, arguments.state)
    if not told.history:
        raise HistoryError(f"run {told.name!r} has not merged a round yet")
    if arguments.format == "png":
        if arguments.output is None:
            raise HistoryError("--format png needs -o FILE")
        _picture(told, arguments.output)
        return 0
    if arguments.output is None:
        _write(told, arguments.format, sys.stdout)
        return 0
    text = io.StringIO()
    _write(told, arguments.format, text)
    write_durably(arguments.output, text.getvalue().encode(), private=False)
    return 0


def told_of(run: str | None, state: Path) -> Told:
    """The history of a server's run, by its name or its server's folder, or of a simulation's folder."""
    from fedmpq.lab.round_log import LOG_NAME

    folder = None if run is None else Path(run).expanduser()
    if folder is not None and folder.is_dir():
        if StateFolder(folder).exists:
            return _of_server(StateFolder(folder), None)
        if (folder / LOG_NAME).is_file():
            return _of_simulation(folder)
        raise HistoryError(f"{folder} is no server's folder, and no simulation's: it has no {LOG_NAME}")
    return _of_server(StateFolder(state), run)


def _of_simulation(folder: Path) -> Told:
    from fedmpq.lab.checkpoint import load_checkpoint
    from fedmpq.lab.round_log import read_log

    history = History(result.facts() for result in read_log(folder))
    return Told(
        folder.resolve().name,
        history,
        lambda: [node.name for node in load_checkpoint(folder).graph.layers],
    )


def _of_server(state: StateFolder, name: str | None) -> Told:
    run, history = read_history(state, name)
    return Told(run.name, history, lambda: [node.name for node in read_graph(state, run).layers])


def _write(told: Told, form: str, file: TextIO) -> None:
    if form == "csv":
        told.history.write_csv(file)
    elif form == "jsonl":
        told.history.write_json_lines(file)
    elif form == "clients":
        _write_clients(told.history, file)
    else:
        console(file).print(_table(told.history))


def _table(history: History) -> Table:
    """What fits 80 columns with four budgets."""
    budgets = [name for name in history.columns if name.endswith("_bit")]
    metric = metric_named(history.rounds[-1].metric if history.rounds else "")
    titles = [name.removeprefix(f"{metric.key}_").replace("_", " ") for name in budgets]
    mean = "mean" if metric.key == "accuracy" else metric.title
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    # Of asynchronous merges: how many were between what boards were sent and what they were merged into.
    behind = ["behind"] if "staleness" in history.columns else []
    for title in ("round", "loss", mean, *titles, "up", "down", "clients", *behind, "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for facts, row in zip(history.rounds, history, strict=True):
        shares = [_text(metric, row.get(name)) for name in ("mean_deployed", *budgets)]
        seated = len(facts.clients)
        came = f"{row['clients']}" if row["clients"] == seated else f"{row['clients']} of {seated}"
        number = f"{facts.round}{'*' if facts.undone else ''}"
        traffic = (bytes_text(facts.bytes_up), bytes_text(facts.bytes_down))
        ages = [f"{row.get('staleness') or 0:.1f}" for _ in behind]
        table.add_row(number, f"{facts.loss:.3f}", *shares, *traffic, came, *ages, f"{facts.seconds:.1f}")
    if any(facts.undone for facts in history.rounds):
        table.caption = "* the model of this round was thrown away; --format jsonl says why"
    return table


def _text(metric: Metric, value: float | None) -> str:
    return "–" if value is None else metric.text(value)


def _write_clients(history: History, file: TextIO) -> None:
    """A line for each client with a letter for each round, then the reasons."""
    places = [(facts.round, one) for facts in history.rounds for one in facts.clients]
    names = {one.client: plain(one.name) for _, one in places}
    width = max(map(len, names.values()))
    marks = {(number, one.client): _MARKS[one.outcome] for number, one in places}
    first, last = history.rounds[0].round, history.rounds[-1].round
    file.write(f"rounds {first} to {last}: T trained, L late, R rejected, D declined, . not selected\n")
    for client, name in sorted(names.items()):
        line = "".join(marks.get((facts.round, client), ".") for facts in history.rounds)
        file.write(f"{name:<{width}}  {line}\n")
    for number, one in places:
        if one.reason:
            file.write(f"round {number}, {plain(one.name)}, {one.outcome}: {plain(one.reason)}\n")


def _picture(told: Told, path: Path) -> None:
    try:
        from fedmpq.lab.report import plot_run
    except ImportError as error:
        raise HistoryError(f"a picture needs fedmpq[lab]: {error}") from None
    if all(facts.mean_deployed is None for facts in told.history.rounds):
        raise HistoryError(f"nothing of run {told.name!r} was measured yet; there is no curve to draw")
    plot_run(told.history.rounds, told.layer_names(), told.name, path)
