"""The rounds of a run as a table."""

from __future__ import annotations

import csv
import io

import pytest

from fedmpq.lab.history import History
from fedmpq.lab.round_log import Accuracies, RoundResult


def result(number: int, accuracies: Accuracies | None) -> RoundResult:
    return RoundResult(number, accuracies, 0.5 * number, 10, 20, (1, 3), (2, 4), 1.5)


@pytest.fixture
def history() -> History:
    shares = Accuracies(0.75, {"2": 0.5, "8": 0.8}, 0.65)
    return History.of_results([result(1, None), result(2, shares)])


def test_rows_columns_and_parts(history: History) -> None:
    assert len(history) == 2
    assert history[1]["accuracy_2_bit"] == 0.5
    assert history["accuracy_8_bit"] == [None, 0.8]
    assert history["mean_deployed"] == [None, 0.65]
    assert history[-1]["bit_widths"] == (2, 4)
    assert history[1:]["round"] == [2]
    with pytest.raises(KeyError, match="no column 'los'; there are round, loss"):
        history["los"]


def test_it_is_shown_as_a_table(history: History) -> None:
    lines = str(history).splitlines()
    assert lines[0].split()[:2] == ["round", "loss"]
    assert lines[1].split()[:3] == ["1", "0.5", "–"]
    assert "2,4" in lines[2]
    assert history._repr_html_().count("<tr>") == 3


def test_csv_takes_it_as_it_is(history: History) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, history.columns)
    writer.writeheader()
    writer.writerows(history)
    assert len(file.getvalue().splitlines()) == 3


def test_no_rounds_are_an_empty_table() -> None:
    assert str(History([])) == ""
