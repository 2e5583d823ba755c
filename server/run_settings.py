"""Settings of a run that exists: which may change, and what a change must not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from fedmpq.method.settings import parse_toml
from fedmpq.server.run_config import ConfigError, RunConfig, make_config
from fedmpq.server.store.records import Run

OPERATIONAL = (
    "rounds",
    "clients_per_round",
    "participation",
    "min_clients",
    "over_selection",
    "quorum",
    "deadline_seconds",
    "away_seconds",
    "calibration_seconds",
    "evaluate_every",
    "keep_models",
    "export",
    "max_samples",
    "max_update_norm",
)
"""How a run is operated. All other settings define what it computes and stay as they were."""


def changed_config(run: Run, text: str, defaults: Sequence[str]) -> RunConfig:
    """The run's settings with those of a TOML text, and with some at their defaults again."""
    plain = {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in fields(RunConfig)
    }
    given = {name.replace("-", "_"): value for name, value in parse_toml(text, ConfigError, "set").items()}
    wanted = given | {name.replace("-", "_"): None for name in defaults}
    if not wanted:
        raise ConfigError("name a setting to change, such as deadline_seconds=600")
    for name in wanted:
        if name in plain and name not in OPERATIONAL:
            raise ConfigError(
                f"{name} defines what run {run.name!r} computes and cannot change; start a run of another "
                "name, with weights if it is to go on from this one's model. These can: "
                f"{', '.join(OPERATIONAL)}"
            )
    values = {name: value for name, value in wanted.items() if name in given}
    values |= {name: plain[name] for name in wanted if name not in given and name in plain}
    values |= {name: None for name in wanted if name not in plain}
    config = make_config({**run.config, **values})
    _check_rounds(run, config)
    return config


def _check_rounds(run: Run, config: RunConfig) -> None:
    """A run has rounds before it, unless it is over."""
    if run.state == "aborted":
        raise ConfigError(f"run {run.name!r} was aborted; start a new one, with weights from its model")
    if config.rounds > run.round:
        return
    if run.state == "finished":
        raise ConfigError(
            f"run {run.name!r} is finished after {run.round} rounds; rounds={run.round + 1} or more lets it "
            "go on"
        )
    raise ConfigError(f"rounds = {config.rounds}, but run {run.name!r} has merged {run.round} already")


def other_operation(run: Run, config: RunConfig) -> dict[str, str]:
    """Operational settings in which a run.toml differs from what holds, by name, in words."""
    holding = make_config(run.config)
    return {
        name: f"{getattr(holding, name)!r} holds, not {getattr(config, name)!r}"
        for name in OPERATIONAL
        if getattr(holding, name) != getattr(config, name)
    }
