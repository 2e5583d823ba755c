"""The clients of a status as a table of 80 columns or more, and who of them is waited for."""

from __future__ import annotations

import time

from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from fedmpq.model.metrics import Metric
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.status_text import NONE, bytes_text, plain, seconds_text, short_name, widths_text

WIDE = 110
"""Columns from which on bit-widths and engines are shown too."""
MOST_NAME = 24
MOST_NAMED = 6
"""Clients that are waited for, named one by one."""
HERE, AWAY = "●", "○"
AWAITED = ("selected", "training", "measuring", "uploading")
"""States of clients that have a place and have not answered."""


def client_table(status: pb.ServerStatus, width: int, metric: Metric) -> Table:
    """Names first, with a mark for those who are connected."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("", "client", "now"):
        table.add_column(title, no_wrap=True)
    for title in ("bits", "samples", metric.title, "up", "down"):
        table.add_column(title, justify="right", no_wrap=True)
    if width >= WIDE:
        for title in ("bit-widths", "engine"):
            table.add_column(title, no_wrap=True)
    # Of a server that does not run there is no such time.
    now = _seconds(status.time) if status.HasField("time") else time.time()
    for client in status.clients:
        more = (widths_text(client.bit_widths), plain(client.engine) or NONE) if width >= WIDE else ()
        style = None if client.connected else "dim"
        table.add_row(*_row(client, now, width, metric), *more, style=style)
    return table


def _row(client: pb.ClientStatus, now: float, width: int, metric: Metric) -> tuple[str, ...]:
    limits = ClaimLimits(
        client.max_samples if client.HasField("max_samples") else None,
        client.max_budget if client.HasField("max_budget") else None,
    )
    return (
        HERE if client.connected else AWAY,
        plain(client.name) if width >= WIDE else short_name(client.name, MOST_NAME),
        _now(client, now),
        _claim(f"{client.budget:g}", f"{limits.budget(client.budget):g}"),
        _claim(f"{client.samples:,}", f"{limits.samples(client.samples):,}"),
        metric.text(client.accuracy) if client.HasField("accuracy") else NONE,
        bytes_text(client.bytes_up),
        bytes_text(client.bytes_down),
    )


def _claim(claimed: str, counted: str) -> str:
    return claimed if counted == claimed else f"{counted}/{claimed}"


def _now(client: pb.ClientStatus, now: float) -> str:
    """What it does; of one that is away for how long, whatever it did before."""
    if client.connected:
        behind = f", {client.staleness} behind" if client.staleness and client.state in AWAITED else ""
        return f"{client.state or 'connected'}{behind}"
    if not client.HasField("last_seen"):
        return "away"
    return f"away {seconds_text(now - _seconds(client.last_seen))}"


def waiting_text(status: pb.ServerStatus) -> str:
    """Who has not answered the open round, since when and until when; empty: nobody is waited for."""
    run = status.run
    awaited = [client for client in status.clients if client.client >= 0 and client.state in AWAITED]
    # Of a server that does not run there is no such time.
    if not awaited or not run.HasField("opened") or not status.HasField("time"):
        return ""
    named = [
        f"{short_name(client.name, MOST_NAME)} ({client.state if client.connected else 'away'})"
        for client in awaited[:MOST_NAMED]
    ]
    more = f" and {len(awaited) - len(named)} more" if len(awaited) > len(named) else ""
    since = f"; {seconds_text(_seconds(status.time) - _seconds(run.opened))} so far"
    if not run.HasField("deadline"):
        return ", ".join(named) + more + since
    left = _seconds(run.deadline) - _seconds(status.time)
    return f"{', '.join(named)}{more}{since}, at most {seconds_text(left)} more"


def _seconds(moment: Timestamp) -> float:
    return moment.seconds + moment.nanos / 1e9
