"""Scales: how far the paper's experiment is cut down.

`mid` has all images at 16x16, 5 local epochs and 20 rounds: 390 local steps a round, as in the paper. It is
the ground on which profiles are judged; in rounds of few steps, what averaging and rounding do to a model
does not show. `paper` is the paper's own setting.

A scale changes how much is trained, and on how many pixels. It changes nothing of the methods, the optimiser,
the budgets or the split among clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fedmpq.lab.paper_tables import DataSet

ScaleName = Literal["mid", "paper"]
SCALE_NAMES: tuple[ScaleName, ...] = get_args(ScaleName)
DEFAULT_SCALE: ScaleName = "mid"
TAIL = 1
"""A cell's score is that of the last round alone: where the learning rates fall, those before had others."""


@dataclass(frozen=True)
class Cut:
    """How much of one data set is trained on, and for how long. None is all there is."""

    train_limit: int | None
    test_limit: int | None
    rounds: int
    epochs: int
    size: int | None = None
    """Images are resized to this height and width; None leaves them."""

    def settings(self) -> dict[str, Any]:
        """As settings of an experiment."""
        return {
            "size": self.size,
            "train_limit": self.train_limit,
            "test_limit": self.test_limit,
            "rounds": self.rounds,
            "epochs": self.epochs,
        }


@dataclass(frozen=True)
class Scale:
    name: ScaleName
    cut: Cut
    local_epochs: tuple[int, ...]
    """The local epochs of the figure."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Any other setting of the experiment, for all data sets."""

    def with_rounds(self, rounds: int) -> Scale:
        """The same, but for the number of rounds."""
        return replace(self, cut=replace(self.cut, rounds=rounds))

    def experiment_settings(self, data_set: DataSet) -> dict[str, Any]:
        """What every cell on this data set has in common."""
        return {
            "model": data_set.model,
            "profile": "paper",
            **self.cut.settings(),
            **self.settings,
        }


_PAPER_CUT = Cut(train_limit=None, test_limit=None, rounds=50, epochs=5)
# An evaluation of five models takes a third of the time that a round trains, and changes nothing of it.
_EVERY_FIFTH = {"evaluate_every": 5}
_MID_CUT = replace(_PAPER_CUT, rounds=20, size=16)
SCALES: dict[ScaleName, Scale] = {
    "mid": Scale(
        "mid",
        cut=_MID_CUT,
        local_epochs=(1, 5, 10),
        settings=_EVERY_FIFTH,
    ),
    "paper": Scale("paper", cut=_PAPER_CUT, local_epochs=(1, 5, 10, 15, 20), settings=_EVERY_FIFTH),
}


def describe(scale: Scale, data_set: DataSet, train_images: int, test_images: int, side: int) -> list[str]:
    """The scale's settings beside the paper's, one line each."""
    cut, paper = scale.cut, _PAPER_CUT
    lines = [
        f"{data_set.title}, {data_set.model}, {side}x{side} pixels (paper: {data_set.side}x{data_set.side})",
        f"{train_images:,} training images (paper: {data_set.train_images:,}), {test_images:,} test images "
        f"(paper: {data_set.test_images:,})",
        f"{cut.rounds} rounds of {cut.epochs} local epochs (paper: {paper.rounds} of {paper.epochs})",
    ]
    others = ", ".join(f"{name} {value}" for name, value in scale.settings.items())
    return [*lines, others] if others else lines
