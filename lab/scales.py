"""Scales: how far the paper's experiment is cut down so that it ends in an hour, a day, or not at all.

A scale changes how much is trained, on how many pixels and images. It changes nothing of the methods, the
optimiser, the budgets or the split among clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fedmpq.lab.paper_tables import DataSet

ScaleName = Literal["small", "medium", "paper"]
SCALE_NAMES: tuple[ScaleName, ...] = get_args(ScaleName)
TAIL = 3
"""A cell's score is the mean of so many last rounds evaluated."""


@dataclass(frozen=True)
class Cut:
    """How much of one data set is trained on, and for how long. None is all there is."""

    train_limit: int | None
    test_limit: int | None
    rounds: int
    epochs: int

    def settings(self) -> dict[str, Any]:
        """As settings of an experiment."""
        return {
            "train_limit": self.train_limit,
            "test_limit": self.test_limit,
            "rounds": self.rounds,
            "epochs": self.epochs,
        }


@dataclass(frozen=True)
class Scale:
    name: ScaleName
    size: int | None
    """Images are resized to this height and width; None leaves them."""
    cut: Cut
    local_epochs: tuple[int, ...]
    """The local epochs of the figure."""
    own_cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By data set, where it differs from `cut`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Any other setting of the experiment, for all data sets."""

    def with_rounds(self, rounds: int) -> Scale:
        """The same, but for the number of rounds."""
        cuts = {name: replace(cut, rounds=rounds) for name, cut in self.own_cuts.items()}
        return replace(self, cut=replace(self.cut, rounds=rounds), own_cuts=cuts)

    def cut_of(self, data_set: DataSet) -> Cut:
        return self.own_cuts.get(data_set.key, self.cut)

    def experiment_settings(self, data_set: DataSet) -> dict[str, Any]:
        """What every cell on this data set has in common."""
        return {
            "model": data_set.model,
            "profile": "paper",
            "size": self.size,
            **self.cut_of(data_set).settings(),
            **self.settings,
        }


_PAPER_CUT = Cut(train_limit=None, test_limit=None, rounds=50, epochs=5)
SCALES: dict[ScaleName, Scale] = {
    "small": Scale(
        "small",
        size=16,
        cut=Cut(train_limit=10000, test_limit=2000, rounds=20, epochs=2),
        local_epochs=(1, 2, 4),
        # With as little of its 200 classes as of CIFAR-10's ten, nothing is learnt at all.
        own_cuts={"tiny-imagenet": Cut(train_limit=20200, test_limit=2020, rounds=30, epochs=2)},
        settings={"evaluate_every": 2},
    ),
    "medium": Scale(
        "medium",
        size=None,
        cut=replace(_PAPER_CUT, test_limit=2000, rounds=30, epochs=2),
        local_epochs=(1, 2, 4, 6, 8),
    ),
    "paper": Scale("paper", size=None, cut=_PAPER_CUT, local_epochs=(1, 5, 10, 15, 20)),
}


def describe(scale: Scale, data_set: DataSet, train_images: int, test_images: int, side: int) -> list[str]:
    """The scale's settings beside the paper's, one line each."""
    cut, paper = scale.cut_of(data_set), _PAPER_CUT
    lines = [
        f"{data_set.title}, {data_set.model}, {side}x{side} pixels (paper: {data_set.side}x{data_set.side})",
        f"{train_images:,} training images (paper: {data_set.train_images:,}), {test_images:,} test images "
        f"(paper: {data_set.test_images:,})",
        f"{cut.rounds} rounds of {cut.epochs} local epochs (paper: {paper.rounds} of {paper.epochs})",
    ]
    others = ", ".join(f"{name} {value}" for name, value in scale.settings.items())
    return [*lines, others] if others else lines
