"""The paper's cells and settings, and a reproduced table as text and picture."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmpq.lab import tables_report
from fedmpq.lab.experiment import PAPER_BUDGETS, Experiment, ExperimentError
from fedmpq.lab.paper_tables import (
    ALPHAS,
    DATA_SETS,
    TABLES,
    DataSet,
    Table,
    budgets_of,
    data_set_of,
    narrowed,
)
from fedmpq.lab.report import Summary
from fedmpq.lab.round_log import Accuracies, RoundResult
from fedmpq.lab.scales import SCALE_NAMES, SCALES, TAIL
from fedmpq.lab.tables_report import Mean, Score

CIFAR10, CIFAR100, TINY = DATA_SETS
PAPER = SCALES["paper"]


def table_of(name: str, alphas: tuple[float, ...] = ()) -> Table:
    return TABLES[name](CIFAR10, alphas, PAPER.local_epochs)


def experiments(name: str) -> dict[tuple[str, str], Experiment]:
    table, common = table_of(name), PAPER.experiment_settings(CIFAR10)
    return {
        (row.key, column.key): table.experiment(row, column, common, "x", 0) for row, column in table.cells()
    }


# The paper's setting


def test_the_paper_scale_is_the_papers_setting() -> None:
    """Section 4 of the paper, written out."""
    cell = experiments("table1")["fedmpq", "0.5"]
    assert cell == Experiment(
        "x",
        method="fedmpq",
        profile="paper",
        model="resnet20",
        size=None,
        train_limit=None,
        test_limit=None,
        budgets=(2, 2, 4, 4, 4, 6, 6, 6, 8, 8),
        alpha=0.5,
        rounds=50,
        evaluate_every=5,
        participation=0.5,
        epochs=5,
        batch_size=64,
        learning_rate=0.1,
        momentum=0.9,
        weight_decay=5e-4,
    )
    plan = cell.recipe().plan
    assert (plan.lasso, plan.prune_density, plan.momentum_bits) == (0.01, 0.03, 32)
    assert not cell.calibrates
    assert {cell.rates().factor(number) for number in range(1, 51)} == {1.0}
    assert cell.clients_per_round == 5
    assert PAPER.experiment_settings(TINY)["model"] == "resnet44"


def test_table_1_is_six_methods_by_three_skews() -> None:
    cells = experiments("table1")
    assert {(cell.method, cell.alpha) for cell in cells.values()} == {
        (method, alpha)
        for method in ("fp32", "fedpaq", "uveqfed", "fpq8", "aqfl", "fedmpq")
        for alpha in ALPHAS
    }
    assert len(cells) == 18
    figures = table_of("table1").figures
    assert figures.keys() == cells.keys()
    assert figures["fp32", "0.1"] == 60.3
    assert figures["fedmpq", "1"] == 69.3


def test_table_2_has_more_clients_in_the_same_proportions() -> None:
    cells = experiments("table2")
    assert {(cell.clients, cell.clients_per_round) for cell in cells.values()} == {
        (10, 5),
        (20, 10),
        (40, 20),
    }
    assert budgets_of(10) == PAPER_BUDGETS
    many = budgets_of(40)
    assert [many.count(bits) for bits in (2, 4, 6, 8)] == [8, 12, 12, 8]
    with pytest.raises(ExperimentError, match="15 clients cannot be divided"):
        budgets_of(15)


def test_table_3_is_a_grid_of_two_thresholds() -> None:
    cells = experiments("table3")
    plans = [cell.recipe().plan for cell in cells.values()]
    assert {(plan.prune_density, plan.lasso) for plan in plans} == {
        (epsilon, lasso) for epsilon in (0.01, 0.02, 0.03, 0.04, 0.05) for lasso in (0.1, 0.01, 0.001)
    }
    assert {cell.method for cell in cells.values()} == {"fedmpq"}
    assert cells["0.01", "0.03"] == experiments("table1")["fedmpq", "0.5"]


def test_table_4_shares_its_ends_with_table_1() -> None:
    cells = experiments("table4")
    assert cells["aqfl", "0.5"] == experiments("table1")["aqfl", "0.5"]
    assert cells["fedmpq", "0.5"] == experiments("table1")["fedmpq", "0.5"]
    assert [cell.ablation for cell in cells.values()] == [
        "all",
        "lasso",
        "msb",
        "msb+lasso",
        "msb+deal",
        "all",
    ]
    assert table_of("table4").figures["msb+deal", "0.5"] == 65.4
    assert table_of("table4", (0.1,)).figures == {}


def test_the_figure_changes_local_epochs_alone() -> None:
    cells = experiments("epochs")
    assert {cell.epochs for cell in cells.values()} == {1, 5, 10, 15, 20}
    assert cells["fedmpq", "5"] == experiments("table1")["fedmpq", "0.5"]


@pytest.mark.parametrize("name", [name for name in TABLES if name != "table1"])
def test_a_table_of_one_skew_takes_one(name: str) -> None:
    with pytest.raises(ExperimentError, match=f"{name} is made for one alpha at a time; 2 were given"):
        table_of(name, (0.1, 1.0))
    assert {cell.settings["alpha"] for cell in table_of(name, (0.1,)).columns} == {0.1}


def test_rows_can_be_chosen_and_best_is_one_of_them() -> None:
    table = narrowed(table_of("table1"), ("best", "aqfl"))
    assert [row.key for row in table.rows] == ["aqfl", "best"]
    best = table.experiment(table.rows[1], table.columns[1], PAPER.experiment_settings(CIFAR10), "x", 0)
    assert (best.method, best.profile) == ("fedmpq", "best")
    with pytest.raises(ExperimentError, match="table4 has no row 'best'; --only takes aqfl, lasso, msb"):
        narrowed(table_of("table4"), ("best",))


def test_the_other_rows_that_can_be_asked_for_are_fp32s() -> None:
    keys = ("fp32", "fp32-0.03", "fp32-0.01", "fp32same")
    table, common = narrowed(table_of("table1"), keys[::-1]), PAPER.experiment_settings(CIFAR10)
    assert [row.key for row in table.rows] == list(keys)
    assert all(row.trains_in_float for row in table.rows)
    plain, *others = (table.experiment(row, table.columns[1], common, "x", 0) for row in table.rows)
    assert [one.learning_rate for one in (plain, *others)] == [0.1, 0.03, 0.01, 0.1]
    assert [replace(one, learning_rate=0.1) for one in others[:2]] == [plain, plain]
    # What devices run is averaged, its rates fall and its statistics are measured just as the best profile's.
    same, best = others[2], Experiment("x", rounds=50)
    assert same == experiments("best")["fp32same", "0.5"]
    assert (same.averaging, same.rates()) == (best.recipe().averaging, best.rates())
    assert same.calibrates
    assert best.calibrates


def test_fpq8_can_be_asked_for_in_the_profile_best() -> None:
    table, common = narrowed(table_of("table1"), ("fpq8best",)), PAPER.experiment_settings(CIFAR10)
    (row,) = table.rows
    cell = table.experiment(row, table.columns[1], common, "x", 0)
    assert (cell.method, cell.profile, cell.recipe().deal) == ("fpq8", "best", "full")


def test_the_parts_of_best_change_one_thing_each() -> None:
    cells = experiments("best")
    best = cells["best", "0.5"]
    assert (best.method, best.profile) == ("fedmpq", "best")
    changed = {
        row: {field.name for field in fields(cell) if getattr(cell, field.name) != getattr(best, field.name)}
        for (row, _), cell in cells.items()
    }
    assert changed == {
        "best": set(),
        "last": {"averaging"},
        "statistics": {"statistics"},
        "constant": {"schedule"},
        "max": {"step_rule"},
        "alg2": {"deal"},
        "slow": {"code_learning_rate"},
        "channels": {"per_channel"},
        "untold": {"logit_adjustment"},
        "narrow": {"first_clips"},
        "fedmpq": {"profile"},
        "averaged": {"method", "profile", "averaging"},
        "fp32same": {"method", "profile", "averaging", "schedule", "statistics", "logit_adjustment"},
    }
    # And each of them really is another run than the best profile's own.
    recipes = [cell.recipe() for cell in cells.values() if cell.method == "fedmpq"]
    assert all(one != other for one, other in itertools.combinations(recipes, 2))


def test_a_data_set_is_told_by_its_classes() -> None:
    assert [data_set_of("x", classes) for classes in (10, 100, 200, 202)] == [CIFAR10, CIFAR100, TINY, TINY]
    with pytest.raises(ExperimentError, match="here has 7 classes; the paper's data sets have 10"):
        data_set_of("here", 7)


@pytest.mark.parametrize("data_set", DATA_SETS, ids=lambda data_set: data_set.key)
def test_mid_scale_changes_pixels_and_rounds_alone(data_set: DataSet) -> None:
    mid, paper = (SCALES[scale].experiment_settings(data_set) for scale in ("mid", "paper"))
    changed = {key for key in mid.keys() | paper.keys() if mid.get(key) != paper.get(key)}
    assert changed == {"size", "rounds"}
    assert (mid["rounds"], mid["epochs"], mid["evaluate_every"]) == (20, 5, 5)
    assert (mid["train_limit"], mid["test_limit"]) == (None, None)
    assert mid["size"] == 16
    assert SCALES["mid"].with_rounds(7).experiment_settings(data_set) == {**mid, "rounds": 7}


def test_mid_scale_has_the_papers_local_steps() -> None:
    for scale in SCALES.values():
        cell = Experiment("x", **scale.experiment_settings(CIFAR10))
        images = (cell.train_limit or CIFAR10.train_images) / cell.clients
        assert images * cell.epochs / cell.batch_size == pytest.approx(390, abs=1)
    assert SCALE_NAMES == tuple(SCALES) == ("mid", "paper")


def test_a_score_is_the_last_rounds() -> None:
    """Before it the learning rates were others."""
    accuracies = [Accuracies(share, {"2": share / 2}, share / 2) for share in (0.2, 0.9, 0.6)]
    results = [
        RoundResult(number, each, 1.0, 0, 0, (), (), 1.0) for number, each in enumerate(accuracies, start=1)
    ]
    assert Summary.of(results, TAIL) == Summary(0.6, {"2": 0.3}, 0.3)


# As text


def summary(accuracy: float, low: float) -> Summary:
    return Summary(accuracy, {"2": low, "8": accuracy}, (low + accuracy) / 2)


SCORES = {
    ("fp32", "0.5"): Score.of({0: Summary(0.8, {}, 0.8)}, trains_in_float=True),
    ("fedmpq", "0.5"): Score.of({0: summary(0.6, 0.4), 2: summary(0.7, 0.2)}, trains_in_float=False),
}


def test_a_mean_has_half_the_span_beside_it() -> None:
    assert str(Mean.of([0.5, 0.54, 0.6])) == "54.7 ±5.0"
    assert str(Mean.of([0.5])) == "50.0"


def test_markdown_shows_deployed_w_and_paper() -> None:
    table = narrowed(table_of("table1", (0.5, 1.0)), ("fp32", "fedmpq"))
    assert tables_report.markdown(table, SCORES).splitlines() == [
        "| method | α = 0.5: deployed | W | paper | α = 1: deployed | W | paper |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| FP32 | – | 80.0 | 77.5 | – | – | 82.1 |",
        "| FedMPQ | 47.5 ±2.5 | 65.0 ±5.0 | 67.1 | – | – | 69.3 |",
    ]
    assert tables_report.budgets_markdown(table, SCORES).splitlines() == [
        "| method | label skew α | W | 2 bit | 8 bit | mean deployed | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| FP32 | 0.5 | 80.0 | – | – | – | 1 |",
        "| FedMPQ | 0.5 | 65.0 ±5.0 | 30.0 ±10.0 | 65.0 ±5.0 | 47.5 ±2.5 | 2 |",
    ]
    assert tables_report.budgets_markdown(table, {}) == ""
    floats = {key: score for key, score in SCORES.items() if key[0] == "fp32"}
    assert tables_report.budgets_markdown(table, floats) == ""


def test_csv_has_a_line_a_cell() -> None:
    table = narrowed(table_of("table1", (0.5, 1.0)), ("fp32", "fedmpq"))
    rows = list(csv.DictReader(io.StringIO(tables_report.csv_text(table, SCORES))))
    assert [(row["row"], row["column"]) for row in rows] == [
        ("fp32", "0.5"),
        ("fedmpq", "0.5"),
        ("fp32", "1"),
        ("fedmpq", "1"),
    ]
    fp32, fedmpq, missing, _ = rows
    assert (fp32["deployed"], fp32["w"], fp32["w_spread"], fp32["seeds"]) == ("", "80.00", "", "0")
    assert (fedmpq["deployed"], fedmpq["deployed_spread"], fedmpq["paper"]) == ("47.50", "2.50", "67.1")
    assert (fedmpq["deployed_2_bit"], fedmpq["seeds"]) == ("30.00", "0 2")
    assert (missing["w"], missing["paper"]) == ("", "82.1")


@pytest.mark.parametrize("name", list(TABLES))
@pytest.mark.parametrize("empty", [False, True])
def test_every_table_becomes_a_small_picture(tmp_path: Path, name: str, empty: bool) -> None:
    table, rng = table_of(name), np.random.default_rng(0)
    scores = {
        (row.key, column.key): Score.of(
            {seed: summary(*rng.random(2)) for seed in range(2)}, row.trains_in_float
        )
        for row, column in table.cells()[:-1]
    }
    path = tmp_path / "table.png"
    tables_report.plot(table, {} if empty else scores, "scale paper, seeds 0, 1", path)
    assert path.stat().st_size < 60_000
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 600
        colors = image.convert("RGB").getcolors(1 << 24)
    assert colors is not None
    assert len(colors) > 5
