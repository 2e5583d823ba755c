"""FedPAQ's quantizer: unbiased, on its levels, and as many bytes as it says."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedmpq.exchange.compression import PayloadError, UpdateError
from fedmpq.exchange.fedpaq import decode, encode

updates = arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def uniforms(count: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random(count)


def slow_quantize(x: float, norm: float, bits: int, uniform: float) -> float:
    """One weight by the textbook: pick the level below or above, in exact arithmetic."""
    if norm == 0:
        return 0.0
    if bits == 1:
        return norm if uniform < (1 + x / norm) / 2 else -norm
    levels = 2 ** (bits - 1) - 1
    target = Fraction(x) / Fraction(norm) * levels
    level = math.floor(target) + (Fraction(uniform) < target - math.floor(target))
    return float(Fraction(norm) * level / levels)


@given(updates, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_decoded_weights_equal_the_textbook(delta: NDArray[np.float32], bits: int, seed: int) -> None:
    chance = uniforms(delta.size, seed)
    payload = encode(delta, bits, chance)
    norm = float(np.abs(delta).max())
    slow = [slow_quantize(float(x), norm, bits, u) for x, u in zip(delta.ravel(), chance, strict=True)]
    decoded = decode(payload)
    assert decoded.dtype == np.float32
    assert np.array_equal(decoded, np.array(slow, np.float32).reshape(delta.shape))


@given(updates, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_size_is_the_bits_promised_and_a_norm(delta: NDArray[np.float32], bits: int, seed: int) -> None:
    payload = encode(delta, bits, uniforms(delta.size, seed))
    assert len(payload.data) == math.ceil(delta.size * bits / 8)
    assert payload.nbytes == 4 + len(payload.data)


@given(updates, st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_no_weight_moves_by_a_whole_level(delta: NDArray[np.float32], bits: int, seed: int) -> None:
    moved = np.abs(decode(encode(delta, bits, uniforms(delta.size, seed))).astype(np.float64) - delta)
    level = float(np.abs(delta).max()) / (2 ** (bits - 1) - 1)
    assert (moved <= level * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_mean_over_all_chances_is_the_update(bits: int) -> None:
    delta = np.linspace(-0.7, 0.9, 41).astype(np.float32)
    strata = 4096
    total = np.zeros(delta.shape)
    for stratum in range(strata):
        total += decode(encode(delta, bits, np.full(delta.size, (stratum + 0.5) / strata)))
    # Evenly spread chances leave at most half a stratum of one level (of twice the norm, at one bit).
    np.testing.assert_allclose(total / strata, delta, atol=1.8 / strata)


@pytest.mark.parametrize("bits", range(1, 9))
def test_random_chances_are_unbiased_too(bits: int) -> None:
    delta = np.full(200_000, 0.3, np.float32)
    delta[0] = 1.0
    decoded = decode(encode(delta, bits, uniforms(delta.size, bits)))[1:].astype(np.float64)
    standard_error = float(decoded.std()) / math.sqrt(decoded.size)
    assert abs(decoded.mean() - 0.3) < 5 * standard_error + 1e-7


@pytest.mark.parametrize("bits", range(2, 9))
def test_weights_on_a_level_stay_there_whatever_the_chance(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    delta = np.arange(-levels, levels + 1, dtype=np.float32)
    for chance in (0.0, 0.5, 1 - 2**-53):
        assert np.array_equal(decode(encode(delta, bits, np.full(delta.size, chance))), delta)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_an_update_of_zeros_stays_zero(bits: int) -> None:
    decoded = decode(encode(np.zeros((3, 5), np.float32), bits, uniforms(15, 0)))
    assert decoded.shape == (3, 5)
    assert not decoded.any()


def test_a_single_weight_is_its_own_norm() -> None:
    for bits in (2, 8):
        assert decode(encode(np.array(-0.25, np.float32), bits, np.array([0.9]))) == np.float32(-0.25)


def test_single_precision_chances_will_do() -> None:
    delta = np.linspace(-1, 1, 9, dtype=np.float32)
    chance = np.linspace(0, 0.99, 9, dtype=np.float32)
    assert encode(delta, 3, chance) == encode(delta, 3, chance.astype(np.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(UpdateError, match="NaN"):
        encode(np.array([1.0, bad], np.float32), 4, uniforms(2, 0))


def test_other_bad_input_is_refused() -> None:
    delta = np.ones(4, np.float32)
    for bits in (0, 9, 2.5):
        with pytest.raises(UpdateError, match="bits is"):
            encode(delta, bits, uniforms(4, 0))  # type: ignore[arg-type]
    with pytest.raises(UpdateError, match="3 uniforms"):
        encode(delta, 4, uniforms(3, 0))
    for bad in (1.0, -0.1, math.nan):
        with pytest.raises(UpdateError, match=r"\[0, 1\)"):
            encode(delta, 4, np.array([0.5, 0.5, bad, 0.5]))
    with pytest.raises(UpdateError, match="no weights"):
        encode(np.zeros((0, 3), np.float32), 4, uniforms(0, 0))


def test_a_payload_that_does_not_add_up_is_refused() -> None:
    payload = encode(np.ones(5, np.float32), 3, uniforms(5, 0))
    with pytest.raises(PayloadError, match="needs 2"):
        decode(replace(payload, data=payload.data + b"\0"))
    with pytest.raises(PayloadError, match="norm"):
        decode(replace(payload, norm=np.float32(math.nan)))
    with pytest.raises(PayloadError, match="bits is 9"):
        decode(replace(payload, bits=9))
