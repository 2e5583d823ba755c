"""The files of deploy/: linted everywhere, built and started where a container engine is."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedmpq.cli import server_command
from fedmpq.server.run_config import read_config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return found


def lint(tool: str, *files: Path) -> None:
    command = shutil.which(tool, path=str(BIN)) or shutil.which(tool)
    if command is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([command, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_containerfile_and_the_script_are_clean() -> None:
    lint("hadolint", DEPLOY / "Containerfile")
    lint("shellcheck", DEPLOY / "make-secrets", ROOT / ".ci" / "run")


def test_only_boards_are_let_in_from_outside(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["8470:8470"]


def test_secrets_are_files_and_all_of_them_are_made(compose: dict[str, Any], tmp_path: Path) -> None:
    wanted = {name for service in compose["services"].values() for name in service.get("secrets", ())}
    assert wanted == set(compose["secrets"])
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    script = tmp_path / "deploy" / "make-secrets"
    assert subprocess.run([script], capture_output=True).returncode == 2
    for _ in range(2):
        subprocess.run([script, "fl.example.org"], check=True, capture_output=True)
        made = {path.name: path.read_text() for path in (tmp_path / "deploy" / "secrets").iterdir()}
    again = subprocess.run([script, "fl.example.org"], check=True, capture_output=True)
    assert again.returncode == 0
    assert made == {path.name: path.read_text() for path in (tmp_path / "deploy" / "secrets").iterdir()}
    for each in compose["secrets"].values():
        assert (tmp_path / "deploy" / each["file"]).stat().st_size > 20
    server = json.loads(made["s3-server.json"])["identities"][0]["credentials"][0]
    assert server["secretKey"] in made["s3-credentials"]
    assert len(made["postgres-password"]) == 32
    assert (tmp_path / "deploy" / "secrets").stat().st_mode & 0o077 == 0


def test_what_is_mounted_is_there_and_options_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith(".") and source != "./run.toml":
                assert (DEPLOY / source).is_file(), source
            elif not source.startswith("."):
                assert source in compose["volumes"]
    server_command.add_arguments(parser := argparse.ArgumentParser())
    words = compose["services"]["server"]["command"]
    arguments = parser.parse_args(words[1:])
    assert arguments.blobs == "s3://fedmpq/payloads"


def test_the_example_is_a_run() -> None:
    assert read_config(DEPLOY / "run.example.toml").name == "digits"


def test_prometheus_and_grafana_find_what_they_show(compose: dict[str, Any]) -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    targets = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    port = next(w for w in compose["services"]["server"]["command"] if w.startswith("--metrics-port="))
    assert targets == [f"127.0.0.1:{port.partition('=')[2]}"]
    assert compose["services"]["prometheus"]["network_mode"] == "service:server"
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["type"] == "prometheus"
    assert json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))["panels"]


@pytest.mark.slow
def test_the_image_is_built_and_runs_as_nobody_else() -> None:
    """Where an engine runs and its base image can be had."""
    engine = next((name for name in ("podman", "docker") if _works(name)), None)
    if engine is None:
        pytest.skip("no container engine runs here")
    words = [engine, "build", "-f", str(DEPLOY / "Containerfile"), "-t", "fedmpq-test", str(ROOT)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=1500)
    if built.returncode and any(word in built.stderr for word in ("dial tcp", "no such host", "pull access")):
        pytest.skip(f"{engine} cannot get the base image here")
    assert built.returncode == 0, built.stderr[-2000:]
    told = subprocess.run(
        [engine, "run", "--rm", "fedmpq-test", "info", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout)["engines"]["native"] == "ready"


def _works(engine: str) -> bool:
    try:
        return subprocess.run([engine, "info"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
