"""What activation codes mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model.activations import MIN_CLIP, CodeFormat, code_bounds, effective_clip

CLIPS = st.floats(-1, 100, width=32)


@pytest.mark.parametrize(
    ("bits", "signed", "bounds"),
    [
        (1, False, (0, 1)),
        (4, False, (0, 15)),
        (8, False, (0, 255)),
        (2, True, (-1, 1)),
        (8, True, (-127, 127)),
    ],
)
def test_code_bounds(bits: int, signed: bool, bounds: tuple[int, int]) -> None:
    assert code_bounds(bits, signed) == bounds


def test_one_bit_has_no_room_for_a_sign() -> None:
    with pytest.raises(ValueError, match="at least 2 bits"):
        code_bounds(1, True)


@given(CLIPS, st.sampled_from([0.0, 6.0, 0.5]))
def test_the_clip_stays_positive_and_within_the_relu(clip: float, maximum: float) -> None:
    effective = effective_clip(np.float32(clip), maximum)
    assert effective.dtype == np.float32
    assert MIN_CLIP <= effective <= (maximum or np.inf)
    if MIN_CLIP <= clip <= (maximum or np.inf):
        assert effective == np.float32(clip)


@given(CLIPS, st.sampled_from([0.0, 6.0]), st.integers(2, 8), st.booleans())
def test_the_greatest_code_is_the_clip(clip: float, maximum: float, bits: int, signed: bool) -> None:
    form = CodeFormat.quantized(np.float32(clip), maximum, bits, signed)
    assert (form.low, form.high) == code_bounds(bits, signed)
    assert form.bound == form.high
    assert form.scale.dtype == np.float32
    top = float(effective_clip(np.float32(clip), maximum))
    assert float(form.scale) * form.high == pytest.approx(top, rel=1e-6)


@pytest.mark.parametrize(("zero_point", "bound"), [(0, 255), (33, 222), (128, 128), (255, 255)])
def test_image_codes_have_their_zero_point_taken_off(zero_point: int, bound: int) -> None:
    form = CodeFormat.image(0.02, zero_point)
    assert form.scale == np.float32(0.02)
    assert (form.low, form.high) == (-zero_point, 255 - zero_point)
    assert form.bound == bound


@given(CLIPS, st.integers(2, 8), st.booleans(), st.integers(1, 64))
def test_an_average_keeps_the_range_in_finer_steps(clip: float, bits: int, signed: bool, window: int) -> None:
    form = CodeFormat.quantized(np.float32(clip), 0.0, bits, signed)
    finer = form.averaged()
    assert (finer.low, finer.high) == code_bounds(8, signed)
    assert float(finer.scale) * finer.high == pytest.approx(float(form.scale) * form.high, rel=1e-6)
    multiplier = form.averaging(np.array(window))
    assert multiplier.dtype == np.float32
    for code in (form.low, 0, 1, form.high):
        mean = float(finer.scale) * float(multiplier) * (window * code)
        assert mean == pytest.approx(float(form.scale) * code, rel=1e-5)


def test_averages_of_8_bit_codes_keep_their_scale() -> None:
    form = CodeFormat(np.float32(0.3), 0, 255)
    assert form.averaged() == form
    assert form.averaging(np.array(1)) == 1
    # 15 codes of 17 steps each.
    assert CodeFormat(np.float32(0.5), 0, 15).averaging(np.array(1)) == 17
