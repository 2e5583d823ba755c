"""A server's status as people read it, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmpq.model.metrics import METRICS, Metric, metric_named
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.client_table import client_table, waiting_text
from fedmpq.server.status_text import NONE, UNBOUNDED_WIDTH, bytes_text, plain, widths_text

_METRIC_TITLES = tuple(metric.title for metric in METRICS.values())


def status_facts(status: pb.ServerStatus, *, running: bool) -> dict[str, Any]:
    """Everything in the message, under the names the .proto gives; bit-widths as lists of numbers."""
    return {
        "running": running,
        "server_version": status.server_version,
        "time": _moment(status, "time"),
        "run": run_facts(status.run) if status.HasField("run") else None,
        "clients": [_client_facts(client) for client in status.clients],
    }


def run_facts(run: pb.RunStatus) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "round": run.round,
        "rounds": run.rounds,
        "phase": run.phase,
        "selected": run.selected,
        "updates": run.updates,
        "wanted": run.wanted or None,
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "created": _moment(run, "created"),
        "ended": _moment(run, "ended"),
        "opened": _moment(run, "opened"),
        "deadline": _moment(run, "deadline"),
        "waiting_since": _moment(run, "waiting_since"),
        "metrics": _metrics_facts(run.metrics) if run.HasField("metrics") else None,
    }


def _metrics_facts(metrics: pb.RoundMetrics) -> dict[str, Any]:
    measured = metrics.HasField("mean_deployed_accuracy")
    return {
        "round": metrics.round,
        "deployed_accuracy": dict(sorted(metrics.deployed_accuracy.items())),
        "mean_deployed_accuracy": metrics.mean_deployed_accuracy if measured else None,
        "measured_by": metrics.measured_by or None,
        "metric": metrics.metric or "accuracy",
        "others": dict(sorted(metrics.others.items())),
        "loss": metrics.loss,
        "seconds": metrics.seconds,
        "updates": metrics.updates,
        "staleness": metrics.staleness if metrics.HasField("staleness") else None,
        "rejected": metrics.rejected,
        "cut": metrics.cut,
        "bytes_up": metrics.bytes_up,
        "bytes_down": metrics.bytes_down,
        "bit_widths": list(metrics.bit_widths),
        "calibrated_on": metrics.calibrated_on or None,
        "calibrated_by": metrics.calibrated_by if metrics.HasField("calibrated_by") else None,
    }


def _client_facts(client: pb.ClientStatus) -> dict[str, Any]:
    return {
        "client_id": client.client_id,
        "name": client.name,
        "client": None if client.client < 0 else client.client,
        "connected": client.connected,
        "budget": client.budget,
        "samples": client.samples,
        "max_samples": client.max_samples if client.HasField("max_samples") else None,
        "max_budget": client.max_budget if client.HasField("max_budget") else None,
        "state": client.state,
        "staleness": client.staleness,
        "bit_widths": list(client.bit_widths),
        "bytes_up": client.bytes_up,
        "bytes_down": client.bytes_down,
        "version": client.version,
        "engine": client.engine,
        "accuracy": client.accuracy if client.HasField("accuracy") else None,
        "reason": client.reason,
        "last_seen": _moment(client, "last_seen"),
        "free_bytes": client.free_bytes if client.HasField("free_bytes") else None,
        "certificate_ends": _moment(client, "certificate_ends"),
    }


def status_table(status: pb.ServerStatus, width: int = UNBOUNDED_WIDTH) -> RenderableType:
    """The run in a few lines, then a row for each client; what does not fit so many columns is left out."""
    parts: list[RenderableType] = [_run_lines(status)] if status.HasField("run") else [Text("no run yet")]
    if not status.clients:
        return Group(*parts, Text("no client has enrolled"))
    parts += [Text(), client_table(status, width, _metric(status.run))]
    troubles = [f"{plain(one.name)} {one.state}: {plain(one.reason)}" for one in status.clients if one.reason]
    return Group(*parts, *map(Text, troubles))


def console(stream: TextIO) -> Console:
    """No markup, no emoji: names and reasons may hold anything. As wide as needed where no one looks."""
    width = None if stream.isatty() else UNBOUNDED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def runs_table(runs: Iterable[pb.RunStatus]) -> Table:
    table = _table("run", "name", "state", "round", "up", "down", "accuracy", "created")
    for run in runs:
        table.add_row(
            run.run_id[:8],
            plain(run.name),
            _state(run),
            f"{run.round}/{run.rounds}",
            bytes_text(run.bytes_up),
            bytes_text(run.bytes_down),
            _named_mean(run),
            run.created.ToDatetime().strftime("%Y-%m-%d %H:%M") if run.HasField("created") else NONE,
        )
    return table


def run_line(run: pb.RunStatus) -> str:
    """In one line: what it is and how far."""
    return f"{plain(run.name)} ({run.run_id[:8]}): {_state(run)}, round {run.round}/{run.rounds}"


def status_line(status: pb.ServerStatus) -> str:
    """What changes from round to round, for a log."""
    connected = sum(client.connected for client in status.clients)
    clients = f"{connected}/{len(status.clients)} clients connected"
    if not status.HasField("run"):
        return f"no run yet, {clients}"
    run = status.run
    answered = f", {run.updates}/{run.wanted or run.selected} {_answers(run)}" if run.selected else ""
    traffic = f"up {bytes_text(run.bytes_up)}, down {bytes_text(run.bytes_down)}"
    metric = _metric(run).title
    return f"{run_line(run)}{answered}, {metric} {_mean_accuracy(run)}, {traffic}, {clients}"


def _run_lines(status: pb.ServerStatus) -> Table:
    run = status.run
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("run", f"{plain(run.name)} ({run.run_id[:8]}), {_state(run)}")
    grid.add_row("round", f"{run.round} of {run.rounds}{_open_round(run)}")
    if waiting := waiting_text(status):
        grid.add_row("waits for", waiting)
    grid.add_row("bytes", f"up {bytes_text(run.bytes_up)}, down {bytes_text(run.bytes_down)}")
    if run.HasField("metrics"):
        _add_metrics(grid, run)
    return grid


def _open_round(run: pb.RunStatus) -> str:
    if not run.selected:
        return ""
    if run.wanted:
        at_work = f"{run.selected - run.updates} boards at work"
        return f"; merge {run.round + 1} has {run.updates} of {run.wanted} updates, {at_work}"
    what = "its calibration" if run.phase == "calibration" else f"round {run.round + 1}"
    return f"; {what} has {run.updates} of {run.selected} {_answers(run)}"


def _answers(run: pb.RunStatus) -> str:
    return "statistics" if run.phase == "calibration" else "updates"


def _add_metrics(grid: Table, run: pb.RunStatus) -> None:
    metrics = run.metrics
    budgets = sorted(metrics.deployed_accuracy.items(), key=lambda item: (len(item[0]), item[0]))
    metric = _metric(run)
    each = ", ".join(f"{budget} bits {metric.text(value)}" for budget, value in budgets)
    each += "".join(f"; {name} {value:.4g}" for name, value in sorted(metrics.others.items()))
    where = ", on the clients' own data" if metrics.measured_by == "clients" else ""
    grid.add_row(metric.title, _mean_accuracy(run) + (f"; {each}" if each else "") + where)
    grid.add_row("bit-widths", widths_text(metrics.bit_widths))
    lost = f", {metrics.rejected} rejected, {metrics.cut} cut" if metrics.rejected or metrics.cut else ""
    age = f" of {metrics.staleness:.1f} merges ago" if metrics.HasField("staleness") else ""
    grid.add_row(
        "last merge" if age else "last round",
        f"{metrics.seconds:.1f} s, loss {metrics.loss:.3f}, {metrics.updates} updates{age}{lost}",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in ("#", "budget", "samples", "up", "down", "round", *_METRIC_TITLES)
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


def _state(run: pb.RunStatus) -> str:
    reason = plain(run.reason)
    if reason.startswith(run.state):
        return reason
    # How many updates there are stands beside it anyway.
    counted = reason.endswith("updates") or " of statistics of " in reason
    return run.state if not reason or counted else f"{run.state}: {reason}"


def _mean_accuracy(run: pb.RunStatus) -> str:
    if not run.HasField("metrics") or not run.metrics.HasField("mean_deployed_accuracy"):
        return NONE
    return _metric(run).text(run.metrics.mean_deployed_accuracy)


def _named_mean(run: pb.RunStatus) -> str:
    """Beside runs of other tasks: what is no accuracy says so."""
    mean, metric = _mean_accuracy(run), _metric(run)
    return mean if mean == NONE or metric.key == "accuracy" else f"{metric.title} {mean}"


def _metric(run: pb.RunStatus) -> Metric:
    """By which its models are measured."""
    return metric_named(run.metrics.metric)


def _moment(message: Message, name: str) -> str | None:
    """A message's moment in UTC; None: it has none."""
    if not message.HasField(name):
        return None
    time: Timestamp = getattr(message, name)
    return f"{time.ToDatetime().isoformat(timespec='milliseconds')}Z"
