"""A reproduced table beside the paper's: Markdown for reading, CSV for computing, and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpq.lab.paper_tables import Line, Table
from fedmpq.lab.report import NO_VALUE, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCURACY = "test accuracy in %, what devices run"


@dataclass(frozen=True)
class Mean:
    """Mean over the seeds and half the span between them, in percent."""

    value: float
    spread: float | None

    @classmethod
    def of(cls, shares: Sequence[float]) -> Mean:
        spread = 50 * (max(shares) - min(shares)) if len(shares) > 1 else None
        return cls(100 * float(np.mean(shares)), spread)

    def __str__(self) -> str:
        return f"{self.value:.1f}" + ("" if self.spread is None else f" ±{self.spread:.1f}")


@dataclass(frozen=True)
class Score:
    """A cell's accuracies over its finished seeds."""

    seeds: tuple[int, ...]
    full_precision: Mean
    deployed: Mean | None
    """Mean over all clients of the model their device runs; None where that is `W` itself."""
    by_budget: dict[str, Mean]

    @classmethod
    def of(cls, summaries: Mapping[int, Summary], trains_in_float: bool) -> Score:
        runs = list(summaries.values())
        budgets = list(runs[0].deployed)
        return cls(
            seeds=tuple(summaries),
            full_precision=Mean.of([run.accuracy for run in runs]),
            deployed=None if trains_in_float else Mean.of([run.mean_deployed for run in runs]),
            by_budget={budget: Mean.of([run.deployed[budget] for run in runs]) for budget in budgets},
        )

    @property
    def headline(self) -> Mean:
        """What a device runs."""
        return self.deployed or self.full_precision


Scores = Mapping[tuple[str, str], Score]
"""By keys of row and column; a cell without a finished seed is not there."""


def markdown(table: Table, scores: Scores) -> str:
    """The table's rows; for each column our deployed accuracy, our `W` and the paper's figure."""
    headings = [table.row_heading]
    for column in table.columns:
        headings += [f"{column.title}: deployed", "W", "paper"]
    lines = [_row(headings), _row(["---"] * len(headings))]
    for row in table.rows:
        cells = [row.title]
        for column in table.columns:
            cells += _entry(table, scores, row, column)
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def budgets_markdown(table: Table, scores: Scores) -> str:
    """What devices of each budget run, if a method deploys other models than `W`."""
    rows = [(cell, scores[key]) for cell in table.cells() if (key := _key(cell)) in scores]
    budgets = sorted({budget for _, score in rows for budget in score.by_budget}, key=float)
    if not budgets:
        return ""
    headings = [
        table.row_heading,
        table.column_heading,
        "W",
        *(f"{budget} bit" for budget in budgets),
        "mean deployed",
        "seeds",
    ]
    lines = [_row(headings), _row(["---"] * len(headings))]
    for (row, column), score in rows:
        values = [score.full_precision, *(score.by_budget.get(budget) for budget in budgets), score.deployed]
        cells = [str(value) if value else NO_VALUE for value in values]
        lines.append(_row([row.title, column.key, *cells, f"{len(score.seeds)}"]))
    return "\n".join(lines) + "\n"


def csv_text(table: Table, scores: Scores) -> str:
    """One line a cell; accuracies in percent, spreads as half the span between the seeds."""
    budgets = sorted({budget for score in scores.values() for budget in score.by_budget}, key=float)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    pairs = ("deployed", "w", *(f"deployed_{budget}_bit" for budget in budgets))
    names = [name for pair in pairs for name in (pair, f"{pair}_spread")]
    writer.writerow(["table", "data_set", "row", "column", "seeds", *names, "paper"])
    for row, column in table.cells():
        score = scores.get((row.key, column.key))
        means: list[Mean | None] = [None] * len(pairs)
        if score:
            means = [score.deployed, score.full_precision, *(score.by_budget.get(b) for b in budgets)]
        values = [text for mean in means for text in _numbers(mean)]
        seeds = " ".join(map(str, score.seeds)) if score else ""
        figure = table.figures.get((row.key, column.key), "")
        writer.writerow([table.name, table.data_set.key, row.key, column.key, seeds, *values, figure])
    return out.getvalue()


def plot(table: Table, scores: Scores, note: str, path: Path) -> None:
    """The table as bars, as lines over its columns or as a map, whichever it asks for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    axes = figure.subplots()
    # The rows of a single column are named at their bars: a legend has no room for long names.
    bars = _bars if len(table.columns) > 1 else _lying_bars
    {"bars": bars, "lines": _lines, "map": _map}[table.picture](axes, table, scores)
    axes.set_title(f"{table.title}\n{note}", fontsize=10)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """With a palette of 64 colours, a third of the bytes; pictures are kept with the documentation."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def _key(cell: tuple[Line, Line]) -> tuple[str, str]:
    return cell[0].key, cell[1].key


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _entry(table: Table, scores: Scores, row: Line, column: Line) -> list[str]:
    score = scores.get((row.key, column.key))
    figure = table.figures.get((row.key, column.key))
    paper = NO_VALUE if figure is None else f"{figure:.1f}"
    if score is None:
        return [NO_VALUE, NO_VALUE, paper]
    return [str(score.deployed or NO_VALUE), str(score.full_precision), paper]


def _numbers(mean: Mean | None) -> tuple[str, str]:
    if mean is None:
        return "", ""
    return f"{mean.value:.2f}", "" if mean.spread is None else f"{mean.spread:.2f}"


def _bars(axes: Axes, table: Table, scores: Scores) -> None:
    """A group of bars for each column, with `W` as a diamond and the paper's figure as a line across."""
    columns, width = np.arange(len(table.columns)), 0.8 / len(table.rows)
    offsets = (np.arange(len(table.rows)) - (len(table.rows) - 1) / 2) * width
    for row, offset in zip(table.rows, offsets, strict=True):
        heights, errors = _lengths(scores, [(row, column) for column in table.columns])
        axes.bar(columns + offset, heights, 0.92 * width, yerr=errors, capsize=2, label=row.title)
    length = 300 * width / len(table.columns)
    _mark(axes, table, scores, lambda i, j, value: (j + offsets[i], value), "k_", length)
    axes.set_xticks(columns, [column.title for column in table.columns])
    axes.set_ylabel(ACCURACY)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _lying_bars(axes: Axes, table: Table, scores: Scores) -> None:
    """A table of one column: the same, each row's bar beside its name."""
    (column,) = table.columns
    rows = range(len(table.rows))
    lengths, errors = _lengths(scores, [(row, column) for row in table.rows])
    axes.barh(rows, lengths, 0.75, xerr=errors, capsize=2, color=[f"C{index}" for index in rows])
    _mark(axes, table, scores, lambda i, j, value: (value, i), "k|", 14)
    axes.set_yticks(rows, [row.title for row in table.rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"{ACCURACY}, {column.title}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


Place = Callable[[int, int, float], tuple[float, float]]
"""Where in the picture a row's and a column's index and an accuracy are."""


def _mark(axes: Axes, table: Table, scores: Scores, place: Place, line: str, length: float) -> None:
    """`W` as diamonds and the paper's figures as lines across the bars, where there are any."""
    exact, paper = [], []
    for i, row in enumerate(table.rows):
        for j, column in enumerate(table.columns):
            key = row.key, column.key
            if key in scores and scores[key].deployed:
                exact.append(place(i, j, scores[key].full_precision.value))
            if key in table.figures:
                paper.append(place(i, j, table.figures[key]))
    for points, style, size, label in (
        (exact, "wD", 4.0, "W"),
        (paper, line, length, "paper's full setting"),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), style, mec="black", ms=size, label=label)


def _lengths(scores: Scores, cells: Sequence[tuple[Line, Line]]) -> tuple[list[float], list[float]]:
    """Lengths of the cells' bars and of their error bars; nothing where there is no score."""
    means = [_headline(scores, row, column) or Mean(0.0, None) for row, column in cells]
    return [mean.value for mean in means], [mean.spread or 0.0 for mean in means]


def _lines(axes: Axes, table: Table, scores: Scores) -> None:
    """A line for each row over the columns' numbers: solid what devices run, dashed `W`."""
    for index, row in enumerate(table.rows):
        columns = [column for column in table.columns if (row.key, column.key) in scores]
        if not columns:
            continue
        places = [float(column.key) for column in columns]
        color = f"C{index}"
        own = [scores[row.key, column.key] for column in columns]
        style: dict[str, Any] = {"color": color, "marker": "o", "ms": 4, "capsize": 2}
        heads = [score.headline for score in own]
        errors = [mean.spread or 0.0 for mean in heads]
        axes.errorbar(places, [mean.value for mean in heads], errors, label=row.title, **style)
        if not row.trains_in_float:
            whole = [score.full_precision.value for score in own]
            axes.plot(places, whole, "--", color=color, lw=1, label=f"{row.title}, W")
    axes.set_xticks([float(column.key) for column in table.columns])
    axes.set_xlabel(table.column_heading)
    axes.set_ylabel(ACCURACY)
    axes.grid(alpha=0.3)
    if scores:
        axes.legend(fontsize=8, ncols=2)


def _map(axes: Axes, table: Table, scores: Scores) -> None:
    """Rows by columns, each cell with its number."""
    values = np.full((len(table.rows), len(table.columns)), np.nan)
    for i, row in enumerate(table.rows):
        for j, column in enumerate(table.columns):
            if mean := _headline(scores, row, column):
                values[i, j] = mean.value
                axes.text(j, i, str(mean), ha="center", va="center", fontsize=8, backgroundcolor="white")
    # A map of nothing but gaps has no range of its own.
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 100.0)
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=low, vmax=high)
    axes.set_xticks(range(len(table.columns)), [column.title for column in table.columns])
    axes.set_yticks(range(len(table.rows)), [row.title for row in table.rows])
    axes.figure.colorbar(image, ax=axes, label=ACCURACY)


def _headline(scores: Scores, row: Line, column: Line) -> Mean | None:
    score = scores.get((row.key, column.key))
    return score.headline if score else None
