from __future__ import annotations

import pytest

from bench import asynchronous
from bench.asynchronous import BEGIN, END, PAGE, WAYS, Run, Way


def run(*points: tuple[float, float]) -> Run:
    return Run(points, 4, 1.5)


def test_when_an_accuracy_was_reached_and_what_was_reached_when() -> None:
    one = run((10.0, 0.3), (50.0, 0.85), (70.0, 0.8), (130.0, 0.95))
    assert (one.reached(0.8), one.reached(0.9), one.reached(0.99)) == (50.0, 130.0, None)
    assert (one.after(60), one.after(70), one.after(1000)) == (0.85, 0.8, 0.95)
    assert one.per_merge == 32.5


def test_the_table_has_medians_and_says_what_was_not_reached() -> None:
    seeds = [
        run((50.0, 0.85), (100.0, 0.95)),
        run((30.0, 0.7), (90.0, 0.91)),
        run((40.0, 0.6), (59.0, 0.8), (120.0, 0.89)),
    ]
    made = asynchronous.table({"a way": seeds}).splitlines()
    assert made[0].startswith("|  | seconds a merge | staleness | seconds to 80 % | seconds to 90 % |")
    cells = [cell.strip() for cell in made[2].strip("|").split("|")]
    assert cells[:3] == ["a way", "25.0 (22.5 to 30.0)", "1.5"]
    assert cells[3] == "59 (50 to 90)"
    assert cells[4] == "not by 90 s, 2 of 3 seeds did"
    assert cells[5] == "70.0 (60.0 to 85.0)"


@pytest.mark.slow
def test_a_way_is_measured() -> None:
    way = Way("little", {"participation": 1.0, "asynchronous": 2}, 2)
    changes = {"budgets": [2, 8, 4], "train_limit": 60, "test_limit": 20}
    found = asynchronous.measure(way, 0, 1, **changes)
    assert (len(found.points), found.merges) == (2, 2)
    assert 0 < found.points[0][0] < found.points[1][0]


def test_the_page_has_a_row_for_every_way() -> None:
    page = PAGE.read_text(encoding="utf-8")
    generated = page.partition(BEGIN)[2].partition(END)[0]
    assert [line.split("|")[1].strip() for line in generated.strip().splitlines()[2:]] == [
        way.title for way in WAYS
    ]
