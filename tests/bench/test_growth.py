import json
import math

import pytest

from bench import growth
from bench.growth import Row


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_the_slope_among_the_largest_sizes(power: float) -> None:
    sizes = [1.0, 10.0, 20.0, 40.0]
    values = [99.0, *(3 * size**power for size in sizes[1:])]
    assert math.isclose(Row("a", "b", sizes, values, "ms").exponent, power)


def test_the_table_marks_what_grows_faster_than_linearly() -> None:
    rows = [
        Row("a", "b", [1, 2, 4], [1, 2, 4], "ms"),
        Row("c", "d", [1000, 2000, 4000], [1, 4, 16], "MB"),
    ]
    assert growth.table(rows).splitlines()[2:] == [
        "| a | b | 1, 2, 4 | 1, 2, 4 ms | 1.00 |",
        "| c | d | 1,000, 2,000, 4,000 | 1, 4, 16 MB | **2.00** |",
    ]


@pytest.mark.slow
def test_json_is_one_object_with_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sizes in {
        "BATCHES": (2, 4),
        "WIDTHS": (4, 8),
        "DEPTHS": (1, 2),
        "EXPORTED_DEPTHS": (1, 2),
        "MERGED_MODELS": ("digits_cnn", "resnet8"),
        "BOARDS": (3, 4),
    }.items():
        monkeypatch.setattr(growth, name, sizes)
    monkeypatch.setattr("sys.argv", ["growth", "--json", "--repetitions", "1"])
    growth.main()
    facts = json.loads(capsys.readouterr().out)
    assert [(row["what"], row["over"]) for row in facts["rows"]] == [
        ("a training step", "images in a batch"),
        ("its memory", "images in a batch"),
        ("a training step", "weights, by width"),
        ("its memory", "weights, by width"),
        ("a training step", "layers"),
        ("its memory", "layers"),
        ("a merge, `mean`", "weights"),
        ("a merge, `mean`", "boards"),
        ("a merge, `agreement`", "weights"),
        ("a merge, `agreement`", "boards"),
        ("an export to ONNX, verified", "layers"),
    ]
    assert all(value > 0 for row in facts["rows"] for value in row["values"])
