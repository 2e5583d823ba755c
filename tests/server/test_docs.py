"""docs/server.md and docs/security.md against the code: settings, options, metrics, numbers."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from fedmpq.cli import (
    client_command,
    dashboard_command,
    doctor_command,
    history_command,
    runs_command,
    server_command,
    split_command,
    status_command,
    track_command,
)
from fedmpq.cli.security_commands import ACTIONS
from fedmpq.server import certificates, tokens
from fedmpq.server.access import BUNDLE_FILES
from fedmpq.server.blobs import FolderBlobs, Outgoing, Uploads
from fedmpq.server.connections import Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.exports import Exports
from fedmpq.server.metrics import ServerMetrics
from fedmpq.server.run_config import RunConfig, parse_config
from fedmpq.server.store.sql import open_store

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
SERVER = (DOCS / "server.md").read_text(encoding="utf-8")
SECURITY = (DOCS / "security.md").read_text(encoding="utf-8")
DASHBOARD = (DOCS / "dashboard.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return SERVER.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> dict[str, str]:
    """The second cell by the first, of those in backquotes."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", text, re.MULTILINE)
    return {name: cell.strip() for name, cell in found}


def test_every_setting_of_a_run_is_there_with_its_default() -> None:
    documented = rows(section("run.toml"))
    assert set(documented) == {field.name for field in fields(RunConfig)}
    for field in fields(RunConfig):
        if field.default is not MISSING and field.default is not None:
            shown = documented[field.name].strip("`")
            plain = not isinstance(field.default, bool | tuple)
            expected = str(field.default) if plain else json.dumps(field.default)
            assert shown.strip('"') == expected, field.name


def test_the_example_of_a_run_is_one() -> None:
    example = re.search(r"((?:^    .*\n)+)", section("run.toml"), re.MULTILINE)
    assert example is not None
    config = parse_config("\n".join(line.strip() for line in example[1].splitlines()), Path("folder"))
    assert (config.name, config.clients_per_round, config.target(20)) == ("night", 8, 8)


def test_every_option_of_the_server_is_there() -> None:
    parser = argparse.ArgumentParser()
    server_command.add_arguments(parser)
    options = {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    assert options - {"--help"} <= set(re.findall(r"--[a-z-]+", SERVER))


def test_every_option_that_is_named_exists() -> None:
    modules = (
        server_command,
        status_command,
        dashboard_command,
        history_command,
        runs_command,
        client_command,
        doctor_command,
        track_command,
        split_command,
    )
    known = {"--upgrade", "--system", "--home-dir", "--shell", "--now"}  # of pip, useradd and systemctl
    for add_arguments in (
        *(module.add_arguments for module in modules),
        *(action.add_arguments for action in ACTIONS.values()),
    ):
        add_arguments(parser := argparse.ArgumentParser())
        known |= {word for action in parser._actions for word in action.option_strings}
    for text in (SERVER, SECURITY, DASHBOARD, (DOCS / "fedmpq-server.service").read_text(encoding="utf-8")):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_every_action_is_there() -> None:
    for name in ACTIONS:
        assert f"| `fedmpq server {name}" in SERVER


def test_every_metric_is_there(tmp_path: Path) -> None:
    async def names() -> set[str]:
        store = open_store(f"sqlite:///{tmp_path / 'fedmpq.db'}")
        exports = Exports(tmp_path, str(tmp_path / "blobs"))
        blobs, outgoing = FolderBlobs(tmp_path / "blobs"), Outgoing(tmp_path / "out")
        uploads = Uploads(tmp_path / "uploads")
        coordinator = Coordinator(store, blobs, outgoing, Connections(1), exports, uploads)
        collected = list(ServerMetrics(coordinator).collect())
        store.close()
        return {family.name + ("_total" if family.type == "counter" else "") for family in collected}

    documented = set(re.findall(r"`(fedmpq_[a-z_]+)`", section("Metrics")))
    of_a_run = ("round", "round_selected", "round_updates", "loss", "score", "budget_score")
    live = {f"fedmpq_{name}" for name in of_a_run}
    assert documented == asyncio.run(names()) | live


def test_grafana_asks_for_metrics_that_there_are() -> None:
    panels = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"fedmpq_\w+", expression)}
    assert asked <= set(re.findall(r"`(fedmpq_[a-z_]+)`", section("Metrics")))
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


@pytest.mark.parametrize(
    "claim",
    [
        f"{certificates.DEFAULT_DAYS} days",
        f"{certificates.AUTHORITY_DAYS // 365} years",
        f"for {tokens.DEFAULT_DAYS:g} days",
        f"`{tokens.PREFIX}...`",
        f"`{BUNDLE_FILES[0]}`",
    ],
)
def test_numbers_in_the_security_page(claim: str) -> None:
    assert claim in SECURITY
