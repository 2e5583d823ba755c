"""The paper's evaluation: its data sets, the cells of Tables 1 to 4 and of the local-epochs figure, and the
accuracies it prints, in percent.

Figures that are not known here are left out; a table shows them as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.lab.experiment import PAPER_BUDGETS, Experiment, ExperimentError, make_experiment
from fedmpq.method.recipe import FLOAT_METHODS, GROWING_AVERAGE

Picture = Literal["bars", "lines", "map"]


@dataclass(frozen=True)
class DataSet:
    """One of the paper's data sets, with its sizes there. It is told by its number of classes."""

    key: str
    title: str
    classes: range
    model: str
    side: int
    train_images: int
    test_images: int


DATA_SETS = (
    DataSet("cifar10", "CIFAR-10", range(10, 11), "resnet20", 32, 50_000, 10_000),
    DataSet("cifar100", "CIFAR-100", range(100, 101), "resnet20", 32, 50_000, 10_000),
    # Its classes are read off its folders: cuts of it are about that have two more than their name says.
    DataSet("tiny-imagenet", "Tiny-ImageNet", range(200, 203), "resnet44", 64, 100_000, 10_000),
)


def data_set_of(spec: str, classes: int) -> DataSet:
    """The paper's data set with this many classes; `spec` is what the error calls it."""
    for data_set in DATA_SETS:
        if classes in data_set.classes:
            return data_set
    raise ExperimentError(
        f"{spec} has {classes} classes; the paper's data sets have 10 (CIFAR-10), 100 (CIFAR-100) and 200 "
        "(Tiny-ImageNet): give one of them"
    )


@dataclass(frozen=True)
class Line:
    """A row or a column: what it is called, and the settings it stands for."""

    key: str
    title: str
    settings: Mapping[str, Any]

    @property
    def trains_in_float(self) -> bool:
        """Its devices run `W` itself, so that there is no deployed accuracy of its own."""
        return self.settings.get("method") in FLOAT_METHODS


def _method(key: str, title: str, **settings: Any) -> Line:
    return Line(key, title, {"method": key, **settings})


METHODS = (
    _method("fp32", "FP32"),
    _method("fedpaq", "FedPAQ"),
    _method("uveqfed", "UVeQFed"),
    _method("fpq8", "FPQ8"),
    _method("aqfl", "AQFL"),
    _method("fedmpq", "FedMPQ"),
)
BEST = _method("best", "FedMPQ (best)", method="fedmpq", profile="best")
FP32_LIKE_BEST = _method(
    "fp32same",
    "FP32 with the same averaging, schedule, calibration and losses",
    method="fp32",
    logit_adjustment=1.0,
    averaging=GROWING_AVERAGE,
    schedule="cosine",
    statistics="calibrated",
)
ON_REQUEST = (
    BEST,
    *(
        _method(f"fp32-{rate:g}", f"FP32, η = {rate:g}", method="fp32", learning_rate=rate)
        for rate in (0.03, 0.01)
    ),
    FP32_LIKE_BEST,
    _method("fpq8best", "FPQ8 (best)", method="fpq8", profile="best"),
)
"""Not in the paper: rows for those who ask for them, wherever methods are."""

ABLATION_ROWS = (
    # The ablation without any of its parts is this method, and so shares its cells with the other tables.
    _method("aqfl", "AQFL"),
    *(
        _method(key, title, method="fedmpq", ablation=key)
        for key, title in (
            ("lasso", "Lasso"),
            ("msb", "MSB"),
            ("msb+lasso", "MSB + Lasso"),
            ("msb+deal", "MSB + Alg. 2"),
        )
    ),
    _method("fedmpq", "all (FedMPQ)"),
)
PARTS_OF_BEST = (
    BEST,
    *(
        _method(key, title, **{**BEST.settings, **settings})
        for key, title, settings in (
            ("last", "devices run the last W, not the moving average", {"averaging": 0.0}),
            ("statistics", "BatchNorm's statistics averaged, not measured", {"statistics": "averaged"}),
            ("constant", "constant learning rates, not a cosine", {"schedule": "constant"}),
            ("max", "steps by the greatest weight, not by least error", {"step_rule": "max"}),
            ("alg2", "bits dealt by Alg. 2, not by least error", {"deal": "pruning_growing"}),
            ("slow", "η_eff = 0.01, not 0.1", {"code_learning_rate": 0.01}),
            ("channels", "one step per output channel", {"per_channel": True}),
            ("untold", "losses not told of classes", {"logit_adjustment": 0.0}),
            ("narrow", "clips begin at 3 and 4, not at 6 and 8", {"first_clips": 1.0}),
        )
    ),
    _method("fedmpq", "FedMPQ (paper)"),
    _method("averaged", "FP32, devices run the moving average", method="fp32", averaging=GROWING_AVERAGE),
    FP32_LIKE_BEST,
)
"""The best profile, and with one part exchanged at a time."""
EPOCH_METHODS = tuple(row for row in METHODS if row.key in ("fp32", "fpq8", "aqfl", "fedmpq"))

ALPHAS = (0.1, 0.5, 1.0)
ALPHA = 0.5
CLIENTS = (10, 20, 40)
THRESHOLDS = (0.01, 0.02, 0.03, 0.04, 0.05)
LASSOS = (0.1, 0.01, 0.001)

Figures = Mapping[tuple[str, str], float]
"""Top-1 accuracy in percent, by keys of row and column."""


def _by_alpha(rows: Mapping[str, tuple[float, float, float]]) -> Figures:
    return {
        (row, f"{alpha:g}"): value
        for row, values in rows.items()
        for alpha, value in zip(ALPHAS, values, strict=True)
    }


TABLE1_FIGURES: dict[str, Figures] = {
    "cifar10": _by_alpha(
        {
            "fp32": (60.3, 77.5, 82.1),
            "fedpaq": (56.3, 77.0, 81.2),
            "uveqfed": (56.8, 76.7, 81.5),
            "fpq8": (54.5, 68.4, 70.8),
            "aqfl": (44.3, 58.0, 62.1),
            "fedmpq": (49.1, 67.1, 69.3),
        }
    ),
    "cifar100": _by_alpha(
        {
            "fp32": (40.3, 47.0, 49.6),
            "fpq8": (35.4, 41.3, 42.3),
            "aqfl": (23.8, 32.9, 36.1),
            "fedmpq": (31.7, 41.1, 43.6),
        }
    ),
    "tiny-imagenet": _by_alpha(
        {
            "fp32": (24.6, 35.1, 38.1),
            "fpq8": (23.8, 33.4, 35.6),
            "aqfl": (17.1, 23.5, 25.3),
            "fedmpq": (20.3, 27.0, 28.2),
        }
    ),
}
ABLATION_FIGURES = {
    "aqfl": 58.0,
    "lasso": 56.8,
    "msb": 55.1,
    "msb+lasso": 56.2,
    "msb+deal": 65.4,
    "fedmpq": 67.1,
}


@dataclass(frozen=True)
class Table:
    """One table on one data set: every row with every column is a cell."""

    name: str
    title: str
    data_set: DataSet
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    row_heading: str
    column_heading: str
    picture: Picture
    figures: Figures = field(default_factory=dict)

    @property
    def file_stem(self) -> str:
        return f"{self.name}-{self.data_set.key}"

    def cells(self) -> list[tuple[Line, Line]]:
        return [(row, column) for column in self.columns for row in self.rows]

    def experiment(
        self, row: Line, column: Line, common: Mapping[str, Any], data: str, seed: int
    ) -> Experiment:
        """A cell's experiment; `common` is what the scale sets for all cells."""
        return make_experiment({**common, **column.settings, **row.settings, "data": data, "seed": seed})


def budgets_of(clients: int) -> tuple[float, ...]:
    """20, 30, 30 and 20 % of the clients at 2, 4, 6 and 8 bits per weight."""
    if clients % len(PAPER_BUDGETS):
        raise ExperimentError(f"{clients} clients cannot be divided by 20, 30, 30 and 20 %; take tens")
    return tuple(budget for budget in PAPER_BUDGETS for _ in range(clients // len(PAPER_BUDGETS)))


def _alpha_column(alpha: float) -> Line:
    return Line(f"{alpha:g}", f"α = {alpha:g}", {"alpha": alpha})


def table1(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """Six methods under three kinds of label skew."""
    columns = tuple(_alpha_column(alpha) for alpha in alphas or ALPHAS)
    title = f"Table 1, {data_set.title}"
    figures = TABLE1_FIGURES[data_set.key]
    return Table("table1", title, data_set, METHODS, columns, "method", "label skew α", "bars", figures)


def table2(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """More clients on the same data."""
    alpha = _one_alpha("table2", alphas)
    columns = tuple(
        Line(f"{n}", f"{n} clients", {"budgets": list(budgets_of(n)), "alpha": alpha}) for n in CLIENTS
    )
    title = f"Table 2, {data_set.title}, α = {alpha:g}"
    # Ten clients is the setting of table 1.
    of_ten = _table1_column(data_set, alpha, "10")
    return Table("table2", title, data_set, METHODS, columns, "method", "clients", "lines", of_ten)


def table3(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """FedMPQ's two thresholds: ε of pruning and λ of the Lasso."""
    alpha = _one_alpha("table3", alphas)
    usual = TrainingPlan()
    rows = tuple(
        Line(f"{x:g}", f"λ = {x:g}", {"method": "fedmpq", **_unless(usual.lasso, lasso=x)}) for x in LASSOS
    )
    columns = tuple(
        Line(f"{x:g}", f"ε = {x:g}", {"alpha": alpha, **_unless(usual.prune_density, prune_density=x)})
        for x in THRESHOLDS
    )
    title = f"Table 3, FedMPQ on {data_set.title}, α = {alpha:g}"
    base = TABLE1_FIGURES[data_set.key].get(("fedmpq", f"{alpha:g}"))
    figures = {} if base is None else {("0.01", "0.03"): base}
    return Table("table3", title, data_set, rows, columns, "λ", "ε", "map", figures)


def _unless(usual: float | None, **setting: float) -> dict[str, float]:
    """The setting where it is not what is taken without it: table 1 has that cell under the same name."""
    return {name: value for name, value in setting.items() if value != usual}


def table4(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """FedMPQ with its parts switched on one by one."""
    alpha = _one_alpha("table4", alphas)
    figures = {}
    if data_set.key == "cifar10" and alpha == ALPHA:
        figures = {(row, f"{alpha:g}"): value for row, value in ABLATION_FIGURES.items()}
    title = f"Table 4, ablation on {data_set.title}"
    columns = (_alpha_column(alpha),)
    return Table("table4", title, data_set, ABLATION_ROWS, columns, "parts", "label skew α", "bars", figures)


def epochs_figure(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """Accuracy over the number of local epochs a round."""
    alpha = _one_alpha("epochs", alphas)
    columns = tuple(
        Line(f"{n}", f"{n} epoch{'s' * (n > 1)}", {"epochs": n, "alpha": alpha}) for n in local_epochs
    )
    title = f"Local epochs, {data_set.title}, α = {alpha:g}"
    # Five epochs is the setting of table 1.
    of_five = _table1_column(data_set, alpha, "5") if 5 in local_epochs else {}
    return Table(
        "epochs", title, data_set, EPOCH_METHODS, columns, "method", "local epochs", "lines", of_five
    )


def parts_of_best(data_set: DataSet, alphas: Sequence[float], local_epochs: Sequence[int]) -> Table:
    """Not in the paper: what each part of the best profile is worth."""
    alpha = _one_alpha("best", alphas)
    title = f"Parts of the best profile, {data_set.title}"
    columns = (_alpha_column(alpha),)
    return Table("best", title, data_set, PARTS_OF_BEST, columns, "parts", "label skew α", "bars")


TableMaker = Callable[[DataSet, Sequence[float], Sequence[int]], Table]
TABLES: dict[str, TableMaker] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "epochs": epochs_figure,
    "best": parts_of_best,
}


def narrowed(table: Table, only: Sequence[str]) -> Table:
    """The table with the named rows alone; those of `ON_REQUEST` are rows wherever methods are."""
    rows = {row.key: row for row in table.rows}
    if "fp32" in rows:
        rows |= {row.key: row for row in ON_REQUEST}
    for key in only:
        if key not in rows:
            raise ExperimentError(f"{table.name} has no row {key!r}; --only takes {', '.join(rows)}")
    return replace(table, rows=tuple(row for key, row in rows.items() if key in only))


def _one_alpha(name: str, alphas: Sequence[float]) -> float:
    if len(alphas) > 1:
        raise ExperimentError(f"{name} is made for one alpha at a time; {len(alphas)} were given to --alpha")
    return alphas[0] if alphas else ALPHA


def _table1_column(data_set: DataSet, alpha: float, column: str) -> Figures:
    figures = TABLE1_FIGURES[data_set.key]
    return {(row, column): value for (row, key), value in figures.items() if key == f"{alpha:g}"}
