from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.kernels.tensors import Conv, Counter, Rescale, StoredCodes
from tests.kernels import training_calls as training
from tests.kernels.training_reference import halved, packed, unpacked, widened

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """Accumulators of a layer as a 1x1 convolution of themselves, with what its backward pass needs."""

    acc: NDArray[np.int32]  # (images, pixels, channels)
    error: NDArray[np.uint16]
    rescale: Rescale
    vectors: tuple[Floats, ...]  # norm, bias, gain, mean of g, mean of g * x

    @property
    def t(self) -> Floats:
        found: Floats = self.acc.astype(np.float32) * self.rescale.scale + self.rescale.shift
        return found

    @property
    def passed(self) -> Floats:
        """The errors of what was not clipped, else 0."""
        inside = (self.t > self.rescale.low) & (self.t < self.rescale.high)
        return np.where(inside, widened(self.error), np.float32(0))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    images, pixels = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 20]))
    channels = draw(st.sampled_from([1, 3, 4, 8, 10, 16, 17, 24, 31, 40]))
    low, high = draw(st.sampled_from([(0, 15), (0, 255), (-128, 127), (-127, 127), (0, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_layer(rng, (images, pixels, channels), low, high)


def random_layer(rng: np.random.Generator, shape: tuple[int, int, int], low: int, high: int) -> Layer:
    channels = shape[2]
    acc = rng.integers(-(2**20), 2**20, shape).astype(np.int32)
    spread = 2 * (high - low) / 2**20
    scale = (spread * rng.choice([-1, 1], channels) * rng.uniform(0.2, 1, channels)).astype(np.float32)
    shift = rng.uniform(low, high, channels).astype(np.float32)
    # Some land on a half and on the bounds exactly.
    acc[:, ::3, ::2] = 0
    shift[::2] = rng.choice([low, high, low + 0.5, high - 0.5], len(shift[::2]))
    error = halved((rng.normal(size=shape) * 10.0 ** rng.integers(-6, 3, shape)).astype(np.float32))
    vectors = tuple(rng.normal(size=channels).astype(np.float32) for _ in range(5))
    return Layer(acc, error, Rescale(scale, shift, low, high), vectors)


def requantized(layer: Layer, pairs: bool, threads: int) -> Array:
    images, pixels, channels = layer.acc.shape
    size = StoredCodes.nbytes(images, pixels * channels, pairs)
    out = np.full(size, 0xEE, np.uint8)
    training.requantize(layer.acc, images, pixels, channels, layer.rescale, pairs, threads, out)
    return out


@per_isa
@given(layers(), st.booleans(), st.integers(1, 3))
def test_requantize_rounds_half_to_even_and_clamps(isa: str, layer: Layer, pairs: bool, threads: int) -> None:
    low, high = layer.rescale.low, layer.rescale.high
    pairs = pairs and high - low <= 15
    expected = np.rint(np.clip(layer.t, low, high)).astype(np.int64) - low
    np.testing.assert_array_equal(requantized(layer, pairs, threads), packed(expected, pairs))


def backward_sums(layer: Layer, threads: int) -> Array:
    """Through a 1x1 convolution by the identity, which gives codes, 8 bits of them, back as accumulators."""
    images, pixels, channels = layer.acc.shape
    conv = Conv(images, 1, pixels, channels, 1, pixels, channels, *(1,) * 4, 0, 0, 1, 1, 1)
    codes = StoredCodes((layer.acc + 128).astype(np.uint8).reshape(-1), False, 128)
    acc = np.empty(layer.acc.size, np.int32)
    identity = np.eye(channels, dtype=np.int8)
    sums = training.conv_backward_sums(
        conv, codes, identity, layer.error, layer.rescale, layer.vectors[0], layer.vectors[1], threads, acc
    )
    np.testing.assert_array_equal(acc, layer.acc.reshape(-1))
    return sums


def small(layer: Layer, bits: int = 8) -> Layer:
    """The same with accumulators of so many bits, spread over the same range of t."""
    scale = (layer.rescale.scale * np.float32(2 ** (21 - bits))).astype(np.float32)
    rescale = Rescale(scale, layer.rescale.shift, layer.rescale.low, layer.rescale.high)
    return Layer((layer.acc >> (21 - bits)).astype(np.int32), layer.error, rescale, layer.vectors)


def expected_sums(layer: Layer) -> list[Array]:
    norm, bias = layer.vectors[:2]
    errors = widened(layer.error)
    above = np.where(layer.t >= layer.rescale.high, errors, np.float32(0))
    below = np.where(layer.t <= layer.rescale.low, errors, np.float32(0))
    products = layer.passed * (layer.acc.astype(np.float32) * norm + bias)
    expected = []
    for terms in (layer.passed, products, above, below):
        by_image = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
        expected.append(np.add.accumulate(by_image.astype(np.float64), axis=0)[-1])
    return expected


@per_isa
@given(layers(), st.integers(1, 3))
def test_backward_sums_add_pixels_in_order_and_images_in_double(isa: str, layer: Layer, threads: int) -> None:
    layer = small(layer)
    np.testing.assert_array_equal(backward_sums(layer, threads), expected_sums(layer))


def kept(layer: Layer, threads: int) -> NDArray[np.int16] | None:
    images, pixels, channels = layer.acc.shape
    out = np.full(layer.acc.shape, 99, np.int16)
    return out if training.keep(layer.acc, images, pixels * channels, threads, out) else None


def kept_sums(layer: Layer, threads: int) -> Array:
    narrow = kept(layer, threads)
    assert narrow is not None
    acc = np.full(layer.acc.shape, 99, np.int32)
    images, pixels, channels = layer.acc.shape
    norm, bias = layer.vectors[:2]
    sums = training.kept_backward_sums(
        narrow, images, pixels, channels, layer.error, layer.rescale, norm, bias, threads, acc
    )
    np.testing.assert_array_equal(acc, layer.acc)
    return sums


@per_isa
@given(layers(), st.integers(1, 3))
def test_sums_of_kept_accumulators_are_those_of_computed_ones(isa: str, layer: Layer, threads: int) -> None:
    eight_bits = small(layer)
    np.testing.assert_array_equal(kept_sums(eight_bits, threads), backward_sums(eight_bits, threads))
    layer = small(layer, 16)
    np.testing.assert_array_equal(kept_sums(layer, threads), expected_sums(layer))


@per_isa
@given(layers(), st.integers(1, 3), st.floats(0, 1, exclude_max=True), st.booleans())
def test_one_accumulator_too_large_for_16_bits_is_found(
    isa: str, layer: Layer, threads: int, place: float, negative: bool
) -> None:
    layer = small(layer, 16)
    index, limit = int(place * layer.acc.size), -(2**15) if negative else 2**15 - 1
    layer.acc.reshape(-1)[index] = limit
    np.testing.assert_array_equal(kept(layer, threads), layer.acc)
    for beyond in (limit + (-1 if negative else 1), 2**16 + 1, -(2**31), 2**31 - 1):
        layer.acc.reshape(-1)[index] = beyond
        assert kept(layer, threads) is None


def backward_error(layer: Layer, threads: int, in_place: bool = True) -> tuple[Array, float]:
    error = layer.error.copy()
    out = error if in_place else np.full_like(error, 99)
    images, pixels, channels = layer.acc.shape
    norm, bias, gain, mean_g, mean_gx = layer.vectors
    greatest = training.backward_error(
        layer.acc,
        error,
        images,
        pixels,
        channels,
        layer.rescale,
        norm,
        bias,
        gain,
        mean_g,
        mean_gx,
        threads,
        out,
    )
    assert in_place or np.array_equal(error, layer.error)
    return out, greatest


@per_isa
@given(layers(), st.integers(1, 3), st.booleans())
def test_backward_error_follows_the_formula(isa: str, layer: Layer, threads: int, in_place: bool) -> None:
    norm, bias, gain, mean_g, mean_gx = layer.vectors
    normalized = layer.acc.astype(np.float32) * norm + bias
    expected = halved(gain * ((layer.passed - mean_g) - normalized * mean_gx))
    error, greatest = backward_error(layer, threads, in_place)
    np.testing.assert_array_equal(error, expected)
    assert greatest == np.abs(widened(expected)).max()


def random_bytes(images: int, count: int, counter: Counter, purpose: int) -> NDArray[np.uint8]:
    """`(images, count)`: whole blocks of 16 bytes for each image."""
    blocks = -(-count // 16)
    seed, client, number = counter.seed, counter.client, counter.round
    assert isinstance(seed, int)
    assert isinstance(client, int)
    assert isinstance(number, int)
    words = [
        kernels.philox_block((block, counter.step, number, counter.layer * 16 + purpose), (seed, client))
        for block in range(images * blocks)
    ]
    return np.stack(words).astype("<u4").view(np.uint8).reshape(images, -1)[:, :count]


def quantized(error: Array, inverse: float, counter: Counter, threads: int) -> NDArray[np.int8]:
    out = np.full(error.shape, 99, np.int8)
    images, count = error.shape
    training.quantize_error(error, images, count, inverse, counter, 3, threads, out)
    return out


@per_isa
@given(
    st.integers(1, 3),
    st.sampled_from([1, 3, 15, 16, 17, 33, 100, 5000]),
    st.floats(2**-10, 2**20, width=32),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_errors_are_rounded_stochastically(
    isa: str, images: int, count: int, inverse: float, seed: int, threads: int
) -> None:
    error = halved(np.random.default_rng(seed).normal(size=(images, count)).astype(np.float32))
    counter = Counter(seed, 2, 3, 4, 5)
    drawn = random_bytes(images, count, counter, 3).astype(np.float32)
    chance = (drawn + np.float32(0.5)) * np.float32(2**-8)
    moved = widened(error) * np.float32(inverse) + chance
    shifted = np.clip(moved, np.float32(-127), np.float32(127.5)) + np.float32(128)
    expected = (np.floor(shifted) - 128).astype(np.int8)
    np.testing.assert_array_equal(quantized(error, inverse, counter, threads), expected)


def test_stochastic_rounding_has_no_bias(isa: str) -> None:
    error = halved(np.full((1, 100_000), 0.735, np.float32))
    codes = quantized(error, 10.0, Counter(1, 2, 3, 4, 5), 1)
    assert set(np.unique(codes)) == {7, 8}
    # Of 100,000 draws of deviation at most 1/2: five standard errors are 0.008.
    assert abs(codes.mean() - 10 * float(widened(error)[0, 0])) < 0.008


SHAPES = [(2, 1024, 16), (3, 256, 32), (2, 64, 64), (1, 196, 24), (2, 50, 10), (1, 5000, 3), (1, 3, 5000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_instruction_sets_and_threads_agree_on_layers_of_real_size(shape: tuple[int, int, int]) -> None:
    layer = random_layer(np.random.default_rng(7), shape, 0, 15)
    before = kernels.isa()
    results = []
    for isa in kernels.supported_isas():
        kernels.force_isa(isa)
        for threads in (1, 2, 3):
            error, greatest = backward_error(layer, threads)
            rows = error.reshape(shape[0], -1)
            codes = quantized(rows, 127 / greatest, Counter(*range(5)), threads)
            stored = requantized(layer, True, threads)
            sums = kept_sums(small(layer, 16), threads)
            results.append((error.tobytes(), greatest, codes.tobytes(), stored.tobytes(), sums.tobytes()))
    kernels.force_isa(before)
    assert len(set(results)) == 1


def test_the_last_of_an_odd_number_of_codes_stands_alone(isa: str) -> None:
    layer = random_layer(np.random.default_rng(3), (2, 3, 5), 0, 15)
    stored = requantized(layer, True, 1).reshape(2, 8)
    assert (stored[:, -1] >> 4 == 0).all()
    np.testing.assert_array_equal(unpacked(stored, 2, 15, True).reshape(-1), requantized(layer, False, 1))
