"""What a person sees of a simulation: a line a round, a table at the end, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fedmpq.lab.round_log import Accuracies, RoundResult
from fedmpq.method.history import RoundFacts
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.metrics import Metric, metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_VALUE = "–"


@dataclass(frozen=True)
class Summary:
    """Means over the last rounds evaluated: accuracies jump from round to round, at few bits above all."""

    accuracy: float
    deployed: dict[str, float]
    mean_deployed: float
    metric: str = "accuracy"
    virtual_time: float | None = None
    """When the run was over by the virtual clock, in seconds; None: it has none."""

    @classmethod
    def of(cls, results: Sequence[RoundResult], tail: int) -> Summary:
        last = [accuracies for _, accuracies in evaluated(results)][-tail:]
        return cls(
            accuracy=float(np.mean([result.accuracy for result in last])),
            deployed={b: float(np.mean([result.deployed[b] for result in last])) for b in last[-1].deployed},
            mean_deployed=float(np.mean([result.mean_deployed for result in last])),
            metric=results[-1].metric,
            virtual_time=results[-1].virtual_time,
        )


def evaluated(results: Sequence[RoundResult]) -> list[tuple[int, Accuracies]]:
    """The rounds whose models were evaluated."""
    return [(result.round, result.accuracies) for result in results if result.accuracies is not None]


def size(nbytes: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def round_line(result: RoundResult, rounds: int) -> str:
    """One round in one line."""
    parts = [f"round {result.round:>{len(str(rounds))}}/{rounds}"]
    if (shares := result.accuracies) is not None:
        number = metric_named(result.metric).number
        # Accuracies need no name: that is what a number beside a model is.
        parts += [] if result.metric == "accuracy" else [metric_named(result.metric).heading]
        parts.append(f"W {number(shares.accuracy)}")
        parts += [f"{budget}b {number(share)}" for budget, share in shares.deployed.items()]
        parts.append(f"mean {number(shares.mean_deployed)}")
        parts += [f"{name} {value:.4g}" for name, value in shares.others.items()]
    parts += [f"loss {result.loss:.3f}", f"up {size(result.bytes_up)}", f"{result.seconds:.1f} s"]
    if result.virtual_time is not None:
        parts.append(f"virtual time {result.virtual_time:.1f} s")
    return "  ".join(parts)


def summary_table(summaries: Mapping[str, Sequence[Summary]], tail: int) -> Table:
    """One row a method: mean over its seeds, and half the spread between them."""
    seeds = max(len(runs) for runs in summaries.values())
    budgets = sorted({b for runs in summaries.values() for run in runs for b in run.deployed}, key=float)
    last = f"mean of the last {tail} rounds" if tail > 1 else "last round"
    metric = metric_named(next(run.metric for runs in summaries.values() for run in runs))
    table = Table(
        title=f"Test {metric.heading}, {last}" + (f" and of {seeds} seeds" if seeds > 1 else ""),
        caption="W: full precision. Bits: what devices of that budget run." if budgets else None,
    )
    table.add_column("method", no_wrap=True)
    for heading in ("W", *(f"{budget} bit" for budget in budgets), "mean deployed"):
        table.add_column(heading, justify="right", no_wrap=heading != "mean deployed")
    timed = any(run.virtual_time is not None for runs in summaries.values() for run in runs)
    if timed:
        table.add_column("virtual time", justify="right")
    for method, runs in summaries.items():
        cells = [_cell([run.accuracy for run in runs], metric)]
        cells += [_cell([run.deployed[b] for run in runs if b in run.deployed], metric) for b in budgets]
        cells.append(_cell([run.mean_deployed for run in runs], metric))
        if timed:
            times = [run.virtual_time for run in runs if run.virtual_time is not None]
            cells.append(f"{np.mean(times):.1f} s" if times else NO_VALUE)
        table.add_row(method, *cells)
    return table


def _cell(values: Sequence[float], metric: Metric) -> str:
    if not values:
        return NO_VALUE
    spread = f" ±{metric.number((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return metric.number(float(np.mean(values))) + spread


def plot_run(rounds: Sequence[RoundFacts], layer_names: Sequence[str], title: str, path: Path) -> None:
    """Accuracy over the rounds, and the global bit-width of every layer over the rounds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    metric = metric_named(rounds[-1].metric if rounds else "")
    measured = [facts for facts in rounds if facts.mean_deployed is not None]
    budgets = sorted({budget for facts in measured for budget in facts.deployed}, key=float)
    height = max(4.2, 1.5 + 0.18 * len(layer_names)) if budgets else 4.2
    figure = Figure(figsize=(12.0 if budgets else 6.5, height), layout="constrained")
    axes: Any = figure.subplots(1, 2 if budgets else 1, squeeze=False)[0]
    # In the colours of the heat map: a budget is a number of bits too.
    for budget in budgets:
        color = colormaps[_COLORS]((float(budget) - 1) / (MAX_BITS - 1))
        points = [(facts.round, facts.deployed.get(budget)) for facts in measured]
        _curve(axes[0], metric, points, f"{budget} bit, deployed", color)
    if any(facts.accuracy is not None for facts in measured):
        points = [(facts.round, facts.accuracy) for facts in measured]
        _curve(axes[0], metric, points, "W (full precision)", "black", dashes=(4, 2))
    _metric_axes(axes[0], metric)
    _virtual_axis(axes[0], rounds)
    if budgets:
        widths = np.array([facts.bit_widths for facts in rounds]).T
        _heat_map(axes[1], widths, [facts.round for facts in rounds], layer_names)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _curve(
    axes: Axes,
    metric: Metric,
    points: Sequence[tuple[int, float | None]],
    label: str,
    color: Any,
    **style: Any,
) -> None:
    """Over the rounds that have a value, shares in percent."""
    known = [(number, metric.factor * value) for number, value in points if value is not None]
    rounds, values = [number for number, _ in known], [value for _, value in known]
    axes.plot(rounds, values, color=color, label=label, **_line(rounds), **style)


def plot_comparison(runs: Mapping[str, Sequence[Sequence[RoundResult]]], title: str, path: Path) -> None:
    """Mean deployed accuracy and that of `W` over the rounds: mean of the seeds, their range shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    metric = metric_named(next(seed[-1].metric for seeds in runs.values() for seed in seeds))
    timed = all(one.virtual_time is not None for seeds in runs.values() for seed in seeds for one in seed)
    for method, seeds in runs.items():
        rounds = _places(seeds, timed)
        shares = [[share for _, share in evaluated(seed)] for seed in seeds]
        for axes, values in (
            (left, [[metric.factor * share.mean_deployed for share in seed] for seed in shares]),
            (right, [[metric.factor * share.accuracy for share in seed] for seed in shares]),
        ):
            (line,) = axes.plot(rounds, np.mean(values, axis=0), label=method, **_line(rounds))
            low, high = np.min(values, axis=0), np.max(values, axis=0)
            axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, lw=0)
    left.set_title("what the devices run, mean over clients")
    right.set_title("W (full precision)")
    _metric_axes(left, metric)
    _metric_axes(right, metric)
    right.set_ylabel("")
    if timed:
        left.set_xlabel("virtual time, s")
        right.set_xlabel("virtual time, s")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _places(seeds: Sequence[Sequence[RoundResult]], timed: bool) -> list[float]:
    """Where the evaluated rounds stand: by their numbers, or by the virtual clock, the mean over seeds."""
    numbers = [number for number, _ in evaluated(seeds[0])]
    if not timed:
        return [float(number) for number in numbers]
    return [float(np.mean([seed[number - 1].virtual_time or 0.0 for seed in seeds])) for number in numbers]


_COLORS = "plasma_r"
_MARKED_ROUNDS = 12


def _line(rounds: Sequence[float]) -> dict[str, Any]:
    """A single round has no line to draw, and a few are read off more easily with a mark at each."""
    return {"lw": 1.6, "marker": "o" if len(rounds) <= _MARKED_ROUNDS else None, "ms": 3.5}


def _metric_axes(axes: Axes, metric: Metric) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel(f"test {metric.heading}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _virtual_axis(axes: Axes, rounds: Sequence[RoundFacts]) -> None:
    """The virtual clock above the rounds, where there is one."""
    known = [(facts.round, facts.virtual_time) for facts in rounds if facts.virtual_time is not None]
    if not known:
        return
    numbers, times = ([0.0, *column] for column in zip(*known, strict=True))
    above = axes.secondary_xaxis(
        "top", functions=(lambda x: _extended(x, numbers, times), lambda t: _extended(t, times, numbers))
    )
    above.set_xlabel("virtual time, s")


def _extended(at: Any, known: Sequence[float], values: Sequence[float]) -> Any:
    """`values` between the points that are known, and straight on beyond the first and the last of them."""
    slope = (values[-1] - values[0]) / max(known[-1] - known[0], 1e-12)
    beyond = np.minimum(at - known[0], 0.0) + np.maximum(at - known[-1], 0.0)
    return np.interp(at, known, values) + slope * beyond


def _heat_map(axes: Axes, widths: NDArray[Any], rounds: Sequence[int], layer_names: Sequence[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(
        widths,
        aspect="auto",
        vmin=0.5,
        vmax=MAX_BITS + 0.5,
        cmap=colormaps[_COLORS].resampled(MAX_BITS),
        interpolation="nearest",
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, len(layer_names) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(layer_names)), layer_names, fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_title("bits of each layer, mean over the round's clients")
    axes.figure.colorbar(image, ax=axes, ticks=range(1, MAX_BITS + 1), label="bits")
