"""How well a model does at its task: one number of which more is better, and others beside it.

| task | the metric | beside it |
|---|---|---|
| classification | accuracy: the share of right classes | – |
| multi_label | macro F1: mean over labels of 2 tp / (2 tp + fp + fn) | share of right labels, macro AUROC |
| regression | R² = 1 - sum (y - t)² / sum (t - mean t)² | mean absolute error, root of the mean square |
| reconstruction | R² of the input's values | mean squared error, AUROC of the anomalies |

A label is said to be there where its logit is above 0. Labels that are neither there nor said to be in any
sample do not count in macro F1. R² adds up squares over all outputs, each around its own mean; what is below
-1 counts as -1, so that one board whose targets hardly vary does not decide a mean over boards. The score of
an anomaly is the mean squared error of its reconstruction, and AUROC the chance that an anomaly has a greater
one than a normal sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import Graph
from fedmpq.model.task import Answers, Task, answers_of, reconstruction_errors

WORST, BEST = -1.0, 1.0
"""No score of any task lies beyond these."""
_BATCH = 256

Floats = NDArray[np.floating[Any]]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class Metric:
    """What a task is measured by: its name in tables, and how people read it."""

    key: str
    title: str
    is_share: bool
    """Whether it is told in per cent."""

    def text(self, value: float) -> str:
        """As a person reads it, with its unit."""
        return f"{value:.1%}" if self.is_share else f"{value:.3f}"

    def number(self, value: float) -> str:
        """The same without its unit, which the heading of a table has."""
        return f"{100 * value:.1f}" if self.is_share else f"{value:.3f}"

    @property
    def factor(self) -> float:
        """What a value is multiplied by in a plot with that heading."""
        return 100.0 if self.is_share else 1.0

    @property
    def heading(self) -> str:
        """With its unit."""
        return f"{self.title} in %" if self.is_share else self.title


_R2 = Metric("r2", "R²", is_share=False)
METRICS: Mapping[Task, Metric] = {
    "classification": Metric("accuracy", "accuracy", is_share=True),
    "multi_label": Metric("f1", "macro F1", is_share=True),
    "regression": _R2,
    "reconstruction": _R2,
}
BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS.values()}


def metric_named(key: str) -> Metric:
    """The metric of a history or a status; those of earlier versions name none and are accuracies."""
    return BY_KEY.get(key or "accuracy", Metric(key, key, is_share=False))


@dataclass(frozen=True)
class Score:
    """How well a model does: the task's metric, and others by name."""

    value: float
    others: Mapping[str, float] = field(default_factory=dict)


class Measurement(Protocol):
    """A score that is added up over batches."""

    def add(self, outputs: Floats, answers: Answers, anomalous: Marks | None) -> None: ...

    def score(self) -> Score: ...


class Judge:
    """Scores a model's outputs, batch by batch."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._measurement = _MEASUREMENTS[graph.task]()

    def add(
        self,
        outputs: Floats,
        images: NDArray[np.uint8],
        given: Answers,
        anomalous: Marks | None = None,
    ) -> None:
        """Outputs of these images; `given` are their labels or targets, `anomalous` says which are none of
        the normal ones, where that is known."""
        self._measurement.add(outputs, answers_of(self._graph, images, given), anomalous)

    def score(self) -> Score:
        return self._measurement.score()


def score_of(
    graph: Graph,
    outputs: Floats,
    images: NDArray[np.uint8],
    given: Answers,
    anomalous: Marks | None = None,
) -> Score:
    """The score of all outputs at once."""
    judge = Judge(graph)
    for start in range(0, len(outputs), _BATCH):
        rows = slice(start, start + _BATCH)
        judge.add(outputs[rows], images[rows], given[rows], None if anomalous is None else anomalous[rows])
    return judge.score()


class _Classes:
    def __init__(self) -> None:
        self._samples = self._right = 0

    def add(self, outputs: Floats, answers: Answers, anomalous: Marks | None) -> None:
        self._samples += len(outputs)
        self._right += int((outputs.argmax(axis=1) == answers).sum())

    def score(self) -> Score:
        return Score(self._right / max(1, self._samples))


class _Labels:
    def __init__(self) -> None:
        self._outputs: list[Floats] = []
        self._there: list[Marks] = []

    def add(self, outputs: Floats, answers: Answers, anomalous: Marks | None) -> None:
        self._outputs.append(outputs)
        self._there.append(answers > 0.5)

    def score(self) -> Score:
        outputs, there = np.concatenate(self._outputs), np.concatenate(self._there)
        said = outputs > 0
        both, either = (said & there).sum(axis=0), said.sum(axis=0) + there.sum(axis=0)
        known = either > 0
        f1 = float(np.mean(2 * both[known] / either[known])) if known.any() else 1.0
        areas = [auroc(outputs[:, label], there[:, label]) for label in range(outputs.shape[1])]
        found = [area for area in areas if area is not None]
        beside = {"auroc": float(np.mean(found))} if found else {}
        return Score(f1, {"label_accuracy": float(np.mean(said == there)), **beside})


class _Values:
    """Sums over the samples, in double precision: sums of squares of the targets lose nothing that counts."""

    def __init__(self) -> None:
        self._samples = 0
        self._squares = self._distances = 0.0
        self._sums: Floats = np.zeros(1)
        self._target_squares = 0.0

    def add(self, outputs: Floats, answers: Answers, anomalous: Marks | None) -> None:
        targets = answers.astype(np.float64)
        apart = outputs - targets
        self._samples += len(outputs)
        self._squares += float(np.square(apart).sum())
        self._distances += float(np.abs(apart).sum())
        self._sums = self._sums + targets.sum(axis=0)
        self._target_squares += float(np.square(targets).sum())

    @property
    def numbers(self) -> int:
        return max(1, self._samples * self._sums.size)

    @property
    def mean_square(self) -> float:
        return self._squares / self.numbers

    def r2(self) -> float:
        spread = self._target_squares - float(np.square(self._sums).sum()) / max(1, self._samples)
        # Below that it is nothing but rounding: all targets are the same.
        if spread <= 1e-12 * self._target_squares:
            return BEST if self._squares == 0 else WORST
        return max(WORST, 1 - self._squares / spread)

    def score(self) -> Score:
        return Score(self.r2(), {"mae": self._distances / self.numbers, "rmse": self.mean_square**0.5})


class _Inputs:
    """Only normal samples count in R² and the error: anomalies are meant to be reconstructed badly."""

    def __init__(self) -> None:
        self._values = _Values()
        self._errors: list[Floats] = []
        self._anomalous: list[Marks] = []

    def add(self, outputs: Floats, answers: Answers, anomalous: Marks | None) -> None:
        marks = np.zeros(len(outputs), np.bool_) if anomalous is None else anomalous
        self._values.add(outputs[~marks], answers[~marks], None)
        self._errors.append(reconstruction_errors(outputs, answers))
        self._anomalous.append(marks)

    def score(self) -> Score:
        area = auroc(np.concatenate(self._errors), np.concatenate(self._anomalous))
        others = {"mse": self._values.mean_square}
        return Score(self._values.r2(), others if area is None else others | {"auroc": area})


_MEASUREMENTS: Mapping[Task, type[Measurement]] = {
    "classification": _Classes,
    "multi_label": _Labels,
    "regression": _Values,
    "reconstruction": _Inputs,
}


def auroc(scores: Floats, positive: Marks) -> float | None:
    """The chance that a positive has a greater score than a negative, ties counting half; None: one of the
    two is missing."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    ranks = below + (counts - 1) / 2
    above = float(ranks[places.reshape(-1)][positive].sum()) - positives * (positives - 1) / 2
    return above / (positives * negatives)
