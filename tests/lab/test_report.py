"""What a person sees: lines, the table's rows and columns, and pictures that are pictures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table

from fedmpq.lab import report
from fedmpq.lab.report import Summary
from fedmpq.lab.round_log import Accuracies, RoundResult

LAYERS = ["conv1", "layer1.0.conv1", "fc"]


def result(number: int, accuracy: float = 0.5, deployed: dict[str, float] | None = None) -> RoundResult:
    shares = {"2": accuracy - 0.1, "8": accuracy - 0.02} if deployed is None else deployed
    mean = float(np.mean(list(shares.values()))) if shares else accuracy
    accuracies = Accuracies(accuracy, shares, mean)
    return RoundResult(number, accuracies, 1.25, 24_000, 12_345_678, (0, 3), (8, 2, 5), 0.5)


def text_of(table: Table, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(table)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue().splitlines()


def rows_of(table: Table) -> dict[str, list[str]]:
    """The table's cells by the name in front."""
    cells = [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in text_of(table)
        if line.startswith(("┃", "│"))
    ]
    return {row[0]: row[1:] for row in cells}


def test_a_summary_is_the_mean_of_the_last_rounds() -> None:
    results = [result(1, 0.1), result(2, 0.3), result(3, 0.5), result(4, 0.7)]
    summary = Summary.of(results, 2)
    assert summary.accuracy == pytest.approx(0.6)
    assert summary.deployed == pytest.approx({"2": 0.5, "8": 0.58})
    assert summary.mean_deployed == pytest.approx(0.54)
    assert Summary.of(results, 9) == Summary.of(results, 4)
    gaps = [
        result(1, 0.1),
        replace(result(2), accuracies=None),
        result(3, 0.5),
        replace(result(4), accuracies=None),
    ]
    assert Summary.of(gaps, 2) == Summary.of([result(1, 0.1), result(3, 0.5)], 2)


def test_the_table_has_a_row_a_method_and_a_column_a_budget() -> None:
    quantized = Summary.of([result(1, 0.5, {"2": 0.25, "2.5": 0.375, "10": 0.125})], 1)
    exact = Summary.of([result(1, 0.75, {})], 1)
    rows = rows_of(report.summary_table({"fedmpq-paper": [quantized], "fp32": [exact]}, 1))
    assert rows == {
        "method": ["W", "2 bit", "2.5 bit", "10 bit", "mean deployed"],
        "fedmpq-paper": ["50.0", "25.0", "37.5", "12.5", "25.0"],
        "fp32": ["75.0", "–", "–", "–", "75.0"],
    }


def test_several_seeds_show_their_mean_and_half_their_spread() -> None:
    runs = [Summary.of([result(1, accuracy)], 1) for accuracy in (0.5, 0.54, 0.6)]
    table = report.summary_table({"aqfl-best": runs}, 1)
    assert rows_of(table)["aqfl-best"][0] == "54.7 ±5.0"
    assert "3 seeds" in text_of(table)[0]


@pytest.mark.parametrize(("tail", "words"), [(1, "%, last round"), (3, "mean of the last 3 rounds")])
def test_the_title_says_what_is_averaged(tail: int, words: str) -> None:
    title = text_of(report.summary_table({"fp32": [Summary.of([result(1)], tail)]}, tail))[0]
    assert words in title


def test_the_papers_table_fits_a_terminal() -> None:
    summary = Summary.of([result(1, 0.5, {"2": 0.4, "4": 0.45, "6": 0.5, "8": 0.5})], 1)
    table = report.summary_table({"fedmpq-paper": [summary] * 3, "uveqfed": [summary] * 3}, 3)
    lines = text_of(table, width=100)
    assert max(map(len, lines)) <= 100
    assert sum("fedmpq-paper" in line for line in lines) == 1
    assert sum("50.0 ±0.0" in line for line in lines) == 2


def test_a_round_is_one_line() -> None:
    line = report.round_line(result(7), 120)
    assert line == "round   7/120  W 50.0  2b 40.0  8b 48.0  mean 44.0  loss 1.250  up 24 kB  0.5 s"
    line = report.round_line(result(7, deployed={}), 9)
    assert line == "round 7/9  W 50.0  mean 50.0  loss 1.250  up 24 kB  0.5 s"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_501, "1 MB"),
        (24_000, "24 kB"),
        (1_234_567, "1.23 MB"),
        (5_000_000_000, "5 GB"),
    ],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert report.size(nbytes) == text


@given(st.integers(0, 10**12 - 10**9))
def test_no_size_is_written_with_an_exponent(nbytes: int) -> None:
    number, unit = report.size(nbytes).split()
    assert "e" not in number
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.01, abs=0.5)


def assert_picture(path: Path) -> None:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(path) as image:
        image.load()
        assert image.width >= 600
        assert image.height >= 400
        colors = image.convert("RGB").getcolors(1 << 24)
    assert colors is not None
    assert len(colors) > 50


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 4, 30])
def test_a_run_becomes_a_picture(tmp_path: Path, rounds: int) -> None:
    results = [result(n, n / 40) for n in range(1, rounds + 1)]
    report.plot_run([each.facts() for each in results], LAYERS, "fedmpq-paper", tmp_path / "run.png")
    assert_picture(tmp_path / "run.png")
    floats = [result(n, n / 40, {}).facts() for n in range(1, rounds + 1)]
    report.plot_run(floats, LAYERS, "fp32", tmp_path / "f.png")
    assert_picture(tmp_path / "f.png")


def test_a_comparison_becomes_a_picture(tmp_path: Path) -> None:
    runs = {
        "fedmpq-paper": [[result(n, n / 10) for n in range(1, 4)], [result(n, n / 8) for n in range(1, 4)]],
        "fp32": [[result(n, n / 5, {}) for n in range(1, 4)]] * 2,
    }
    report.plot_comparison(runs, "digits_cnn on digits", tmp_path / "compare.png")
    assert_picture(tmp_path / "compare.png")
