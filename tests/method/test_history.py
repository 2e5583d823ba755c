"""The rounds of a run as a table."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fedmpq.method.history import ClientFacts, History, RoundFacts


def facts(number: int, accuracy: float | None, deployed: dict[str, float]) -> RoundFacts:
    mean = None if accuracy is None else 0.65
    clients = (
        ClientFacts(1, "a", "trained", bit_widths=(2, 3), bytes_up=10, bytes_down=12),
        ClientFacts(3, "b", "late", "the deadline passed", bit_widths=(2, 4), bytes_down=8),
    )
    phases = {"training": 1.0, "merging": 0.5}
    return RoundFacts(
        number, 0.5 * number, accuracy, deployed, mean, "", 10, 20, (2, 4), 1.5, phases, clients
    )


@pytest.fixture
def history() -> History:
    return History([facts(1, None, {}), facts(2, 0.75, {"2": 0.5, "8": 0.8})])


def test_rows_columns_and_parts(history: History) -> None:
    assert len(history) == 2
    assert history[1]["accuracy_2_bit"] == 0.5
    assert history["accuracy_8_bit"] == [None, 0.8]
    assert history["mean_deployed"] == [None, 0.65]
    assert history[-1]["bit_widths"] == (2, 4)
    assert history[1:]["round"] == [2]
    assert (history["clients"], history["late"], history["declined"]) == ([1, 1], [1, 1], [0, 0])
    assert (history[0]["seconds_merging"], history[0]["seconds_measuring"]) == (0.5, None)
    with pytest.raises(KeyError, match="no column 'los'; there are round, loss"):
        history["los"]


def test_it_is_shown_as_a_table(history: History) -> None:
    lines = str(history).splitlines()
    assert lines[0].split()[:2] == ["round", "loss"]
    assert lines[1].split()[:3] == ["1", "0.5", "–"]
    assert "2,4" in lines[2]
    assert history._repr_html_().count("<tr>") == 3


def test_it_writes_itself_as_csv_and_json_lines(history: History) -> None:
    file = io.StringIO()
    history.write_csv(file)
    lines = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [line["accuracy_8_bit"] for line in lines] == ["", "0.8"]
    assert lines[0]["bit_widths"] == "2 4"
    file = io.StringIO()
    history.write_json_lines(file)
    rounds = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [each["deployed"] for each in rounds] == [{}, {"2": 0.5, "8": 0.8}]
    assert rounds[1]["clients"][1]["reason"] == "the deadline passed"


def test_budgets_that_come_later_stand_beside_the_others() -> None:
    history = History([facts(1, 0.5, {"8": 0.5}), facts(2, 0.5, {"2.5": 0.1, "8": 0.5, "4": 0.2})])
    budgets = ("accuracy_2.5_bit", "accuracy_4_bit", "accuracy_8_bit")
    assert history.columns[:7] == ("round", "loss", "accuracy", *budgets, "mean_deployed")


def test_csv_takes_it_as_it_is(history: History) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, history.columns)
    writer.writeheader()
    writer.writerows(history)
    assert len(file.getvalue().splitlines()) == 3


def test_no_rounds_are_an_empty_table() -> None:
    assert str(History([])) == ""
