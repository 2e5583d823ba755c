"""Exported models in a folder: what their cards say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpq.dashboard.places import Facts, NotThere

_CARD = ".json"


def models_in(folder: Path, key: str, names: Mapping[int, str]) -> list[Facts]:
    """The files in `folder` that have a card, in the order of their names.

    `key` is the folder's name for the page, `names` are those of the clients.
    """
    return [
        _facts(card, facts, key, names)
        for card in sorted(folder.glob(f"*{_CARD}"))
        if (facts := _read(card)) is not None and _file_of(card).is_file()
    ]


def checked_file(folder: Path, name: str) -> Path:
    """A file of `models_in`; no other can be had."""
    for card in folder.glob(f"*{_CARD}"):
        path = _file_of(card)
        if path.name == name and path.is_file() and _read(card) is not None:
            return path
    raise NotThere(f"there is no model {name!r}; a newer one may have taken its place")


def _file_of(card: Path) -> Path:
    return card.with_name(card.name.removesuffix(_CARD))


def _read(card: Path) -> dict[str, Any] | None:
    """None: it is no card of a model."""
    try:
        facts = json.loads(card.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and {"sha256", "file_bytes", "target"} <= set(facts) else None


def _facts(card: Path, facts: dict[str, Any], key: str, names: Mapping[int, str]) -> Facts:
    clients = facts.get("clients", ())
    return {
        "folder": key,
        "file": _file_of(card).name,
        "format": facts["target"],
        "round": facts.get("round"),
        "boards": [names.get(client, str(client)) for client in clients],
        "budget": facts.get("budget"),
        "average_bits": facts.get("average_bits"),
        "bytes": facts["file_bytes"],
        "accuracy": facts.get("accuracy"),
        "verified_images": facts.get("verified_images"),
        "sha256": facts["sha256"],
    }
