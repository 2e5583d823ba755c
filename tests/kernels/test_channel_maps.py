"""What lies between a layer's passes, beside the same in NumPy, one operation after the other."""

from __future__ import annotations

import math
from ctypes import c_float
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import bound_maps
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.prototypes import FedmpqChannelMap

Doubles = NDArray[np.float64]
Vector = NDArray[np.float32]

SEEDS = st.integers(0, 2**32 - 1)
CHANNELS = st.integers(1, 40)


class Map:
    """A map of random numbers, and the memory that it is computed into."""

    def __init__(self, seed: int, channels: int, normed: bool, offset: bool) -> None:
        random = np.random.default_rng(seed)
        self.channels, self.count, self.eps = channels, int(random.integers(1, 5000)), 1e-5
        self.given: dict[str, Any] = {
            name: random.normal(size=channels).astype(np.float32)
            for name in ("scale", "gamma", "beta", "unit", *(["offset"] if offset else []))
        }
        sums = random.normal(size=channels) * self.count * 50
        # Mostly a variance above zero, sometimes one that rounding has taken below.
        squares = sums * sums / self.count * random.choice([1 - 1e-15, 1.0, 1.3], channels)
        self.sums = np.concatenate([sums, squares])
        self.statistics = np.zeros(2 * channels + 3)
        self.out = {
            name: np.zeros(channels, np.float32) for name in ("t_scale", "t_shift", "norm", "bias", "gain")
        }
        self.struct = FedmpqChannelMap(
            channels=channels, count=self.count, eps=self.eps, mean_at=1, variance_at=channels + 2
        )
        left_out = () if normed else ("gamma", "beta", "unit")
        for name, vector in {**self.given, **self.out}.items():
            if name not in left_out:
                self.struct.point(name, vector, channels)
        self.struct.point("sums", self.sums, 2 * channels)
        self.struct.point("statistics", self.statistics, 2 * channels + 3)

    def run(self, source: float, target: float) -> None:
        bound_maps.map_channels(self.struct, c_float(source), c_float(target))()

    def wide(self, name: str) -> Doubles:
        found: Doubles = self.given[name].astype(np.float64)
        return found


def reference(m: Map, source: float, target: float) -> tuple[dict[str, Vector], Doubles]:
    """As `training.normalization` states it."""
    s = m.wide("scale") * source
    centre, squares = m.sums.reshape(2, -1) / m.count
    mean = centre * s
    variance = np.maximum(squares - centre * centre, 0.0) * s * s
    tracked = np.zeros_like(m.statistics)
    tracked[1 : 1 + m.channels] = mean + m.wide("offset") if "offset" in m.given else mean
    tracked[2 + m.channels : 2 + 2 * m.channels] = variance * (m.count / max(1, m.count - 1))
    r = 1.0 / np.sqrt(variance + m.eps)
    gamma = m.wide("gamma")
    found = {
        "norm": s * r,
        "bias": -(mean * r),
        "t_scale": s * r * gamma / target,
        "t_shift": (-(mean * r) * gamma + m.wide("beta")) / target,
        "gain": gamma * r * m.wide("unit"),
    }
    return {name: vector.astype(np.float32) for name, vector in found.items()}, tracked


@given(SEEDS, CHANNELS, st.booleans())
def test_a_map_with_batchnorm_is_numpys_to_the_bit(seed: int, channels: int, offset: bool) -> None:
    made = Map(seed, channels, True, offset)
    source, target = np.random.default_rng(seed + 1).uniform(1e-4, 2, 2).astype(np.float32).tolist()
    made.run(source, target)
    expected, tracked = reference(made, source, target)
    for name, vector in expected.items():
        np.testing.assert_array_equal(made.out[name], vector, err_msg=name)
    np.testing.assert_array_equal(made.statistics, tracked)


@given(SEEDS, CHANNELS, st.booleans())
def test_a_map_without_batchnorm_scales_and_shifts(seed: int, channels: int, offset: bool) -> None:
    made = Map(seed, channels, False, offset)
    made.run(0.25, 0.375)
    shift = made.wide("offset") if offset else np.zeros(channels)
    np.testing.assert_array_equal(made.out["t_scale"], (made.wide("scale") * 0.25 / 0.375).astype(np.float32))
    np.testing.assert_array_equal(made.out["t_shift"], (shift / 0.375).astype(np.float32))
    assert not made.statistics.any()
    assert not made.out["norm"].any()


@pytest.mark.parametrize("channel", range(3))
def test_a_map_that_is_not_finite_is_an_error(channel: int) -> None:
    made = Map(1, 3, True, False)
    made.given["gamma"][channel] = math.inf
    with pytest.raises(FloatingPointError):
        made.run(1.0, 1.0)


def test_a_map_that_cannot_be_is_refused() -> None:
    for field, value in (("channels", 0), ("channels", 65537), ("count", 0), ("mean_at", -1)):
        made = Map(1, 3, True, False)
        setattr(made.struct, field, value)
        with pytest.raises(KernelError, match=f"{field}={value}"):
            made.run(1.0, 1.0)
    without = Map(1, 3, True, False)
    without.struct.unit = None
    with pytest.raises(KernelError):
        without.run(1.0, 1.0)


def sides(sums: Doubles, count: int, below: bool) -> dict[str, Vector]:
    channels = sums.size // 4
    names = ("clip", "shift", "scale", "mean_g", "mean_gx")
    found = {name: np.full(1 if name == "clip" else channels, 7, np.float32) for name in names}
    clip, shift, scale, *means = found.values()
    first, second = means
    bound_maps.side_gradients(sums, channels, count, below, clip, shift, scale, (first, second))()
    return found


HARD = st.one_of(
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, -0.0, 1e16, -1e16, 1.0, -1.0, 2**-53, 3 * 2**-54, -(2**-53), 1e-300, 2.0**970]),
)
"""Numbers whose sums are hard to round: half-way between two, cancelling, or far apart."""


@given(st.lists(HARD, min_size=1, max_size=24), st.booleans())
def test_clips_are_exact_sums(values: list[float], below: bool) -> None:
    rows = np.array([values, values[::-1], values, [-value / 3 for value in values]])
    found = sides(rows.reshape(-1), 12, below)
    expected = math.fsum(rows[2]) - (math.fsum(rows[3]) if below else 0.0)
    with np.errstate(over="ignore"):
        assert found["clip"][0] == np.float32(expected)
        np.testing.assert_array_equal(found["shift"], rows[0].astype(np.float32))
        np.testing.assert_array_equal(found["scale"], rows[1].astype(np.float32))
        np.testing.assert_array_equal(found["mean_g"], (rows[0] / 12).astype(np.float32))
        np.testing.assert_array_equal(found["mean_gx"], (rows[1] / 12).astype(np.float32))


def test_without_batchnorm_there_are_no_means_and_perhaps_no_gradients() -> None:
    sums, clip, means = np.arange(8.0), np.zeros(1, np.float32), np.ones((2, 2), np.float32)
    bound_maps.side_gradients(sums, 2, 0, False, clip, None, None, (means[0], means[1]))()
    assert clip.tolist() == [9.0]
    assert not means.any()


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sums_that_are_not_finite_are_an_error(place: int, value: float) -> None:
    sums = np.zeros(8)
    sums[place] = value
    with pytest.raises(FloatingPointError):
        sides(sums, 1, True)


@given(SEEDS, CHANNELS, st.integers(1, 9), st.sampled_from([1e-44, 1e-38, 1.0, 1e30]))
def test_scales_of_errors(seed: int, channels: int, images: int, size: float) -> None:
    random = np.random.default_rng(seed)
    greatest = (random.uniform(0, size, images)).astype(np.float32)
    weight_scale = random.uniform(0.01, 1, channels).astype(np.float32)
    numbers, scales = np.zeros(2, np.float32), np.zeros(channels, np.float32)
    bound_maps.error_scales(greatest, images, c_float(0.3), weight_scale, channels, numbers, scales)()
    scale = greatest.max() / np.float32(127)
    assert numbers[0] == scale
    assert numbers[1] == (np.float32(1) / scale if scale >= np.finfo(np.float32).tiny else 0)
    np.testing.assert_array_equal(scales, scale * np.float32(0.3) / weight_scale)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("image", range(3))
def test_a_greatest_error_that_is_not_finite_is_an_error(image: int, value: float) -> None:
    greatest = np.ones(3, np.float32)
    greatest[image] = value
    call = bound_maps.error_scales(
        greatest, 3, c_float(1), np.ones(2, np.float32), 2, np.zeros(2, np.float32), np.zeros(2, np.float32)
    )
    with pytest.raises(FloatingPointError):
        call()
