"""Where a step's time goes: every kernel has its share, and the library is as it was afterwards."""

import pytest

from bench import train_step
from bench.step_profile import Profile, profile, shape_of
from bench.workload import make_workload
from fedmpq.kernels.library import library
from fedmpq.kernels.prototypes import FedmpqConv


def test_kernels_and_what_is_around_them_are_the_whole_step() -> None:
    before = library.fedmpq_conv_forward
    found = profile(make_workload("digits_cnn", 2), "paper", 1, 3)
    assert library.fedmpq_conv_forward is before
    assert {"conv_forward", "conv_backward_input", "conv_backward_weights", "update_codes"} <= set(
        found.kernels
    )
    products = sum(seconds for name, seconds in found.kernels.items() if name.startswith("conv_"))
    assert sum(found.layers.values()) == pytest.approx(products)
    assert 0 < sum(found.kernels.values()) < found.seconds


def test_shares_are_shown_greatest_first_and_small_ones_not() -> None:
    found = Profile(2, 1.0)
    found.add("fedmpq_requantize", 0.2, None)
    found.add("fedmpq_keep", 0.001, None)
    found.add("fedmpq_conv_forward", 0.5, FedmpqConv(2, 8, 8, 3, 4, 4, 16, 3, 3, 2, 2, 1, 1, 1, 1, 1))
    lines = [line.split("  ")[0] for line in found.lines()]
    assert lines == [
        *("kernel", "conv_forward", "around the kernels", "requantize", "products of layers"),
        "8x8, 3 to 16 channels by 3x3/2, forward",
    ]
    assert next(line for line in found.lines() if line.startswith("conv_forward")).split()[1:] == [
        "250.000",
        "50.0",
    ]


def test_a_shape_names_groups() -> None:
    deep = FedmpqConv(1, 8, 8, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, 1, 1, 16)
    assert shape_of(deep) == "8x8, 16 channels depthwise by 3x3/1"
    grouped = FedmpqConv(1, 8, 8, 16, 8, 8, 32, 1, 1, 1, 1, 0, 0, 1, 1, 4)
    assert shape_of(grouped) == "8x8, 16 to 32 channels by 1x1/1 in 4 groups"


def test_the_command_shows_a_profile_in_place_of_rivals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step, "MODELS", {"digits_cnn": (3, 32, 32)})
    monkeypatch.setattr(train_step, "BATCHES", (2,))
    monkeypatch.setattr("sys.argv", ["train_step", "--model", "digits_cnn", "--batch", "2", "--profile"])
    train_step.main()
    out = capsys.readouterr().out
    assert "around the kernels" in out
    assert "torch" not in out
