"""The card beside an exported file, `NAME.onnx.json`: what it is, and what was measured of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedmpq.export.format import FORMAT
from fedmpq.export.target import PIXELS, Feeding, Target
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Input

Card = dict[str, Any]
COLOURS = {
    1: "grey: (19595 R + 38470 G + 7471 B + 32768) >> 16",
    3: "red, green, blue, in this order",
}


def card_path(path: Path) -> Path:
    """Where the card of the file at `path` lies."""
    return path.with_name(f"{path.name}.json")


def describe(model: DeployedModel, target: Target, content: bytes) -> Card:
    """All that is known without running the file."""
    image, bare = model.graph.input, bare_bytes(model)
    return {
        "format": FORMAT,
        "target": target.name,
        "suffix": target.suffix,
        "runtime": _with_version(target.runtime),
        "graph": model.graph.id,
        "model": model.graph.name,
        "task": model.graph.task,
        **model.facts,
        "bit_widths": model.bit_widths,
        "average_bits": round(model.bits_per_weight, 4),
        "bare_bytes": round(bare),
        "file_bytes": len(content),
        "size_ratio": round(len(content) / bare, 4),
        "sha256": hashlib.sha256(content).hexdigest(),
        "input": {
            "pixels": [image.height, image.width, image.channels],
            "scale": image.scale,
            "zero_point": image.zero_point,
            **_feeding(image, getattr(target, "feeding", PIXELS)),
            "note": _note(image),
        },
        "class_names": list(model.class_names),
    }


def task_facts(model: DeployedModel) -> dict[str, Any]:
    """What a file itself tells of its task and of what its input stands for."""
    image = model.graph.input
    return {"task": model.graph.task, "input": {"scale": image.scale, "zero_point": image.zero_point}}


def _feeding(image: Input, feeding: Feeding) -> dict[str, str]:
    """What a program in any language needs to know to feed the file as training did."""
    facts = {
        "dtype": feeding.dtype,
        "layout": feeding.layout,
        "stored": feeding.stored,
        "stands_for": f"{image.scale!r} * (pixel - {image.zero_point}); the first layer reads the difference",
    }
    if image.channels in COLOURS and image.height > 1:
        facts["colours"] = COLOURS[image.channels]
        facts["photos"] = "the whole image, upright by EXIF, without alpha, resized by area (BOX filter)"
    return facts


def _note(image: Input) -> str:
    """How the file is fed."""
    if image.height > 1:
        return "normalisation is inside the file: give it pixels"
    return (
        f"normalisation is inside the file: give it bytes; a sequence of {image.width} steps of"
        f" {image.channels} channels is an image of height 1"
    )


def run_facts(
    run: str, round_number: int, clients: Sequence[int], budget: float, boards: Sequence[str] = ()
) -> dict[str, Any]:
    """Facts of a model of a run: its round, the clients that deploy it, by number and, of a server's run, by
    name, and their bits per weight."""
    facts = {"run": run, "round": round_number, "clients": list(clients), "budget": budget}
    return facts | ({"boards": list(boards)} if boards else {})


def bare_bytes(model: DeployedModel) -> float:
    """`sum b_l m_l / 8`: what no file can be smaller than without compression."""
    widths = model.bit_widths.values()
    return sum(b * m for b, m in zip(widths, model.graph.layer_sizes, strict=True)) / 8


def _with_version(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        # A runtime of the user's own need not be a Python distribution.
        return distribution
