"""UVeQFed: the lattice against brute force, the error's distribution, the coder, the size of a payload."""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedmpq.exchange import entropy_coder
from fedmpq.exchange.compression import PayloadError, UpdateError
from fedmpq.exchange.uveqfed import (
    UVeQFedPayload,
    decode,
    encode,
    lattice_points,
    nearest_points,
    uniforms_needed,
)
from tests.cost import cpu_seconds

Floats = NDArray[np.float64]

# Second moment per dimension of the hexagonal lattice with neighbours at distance 1: G2 times the cell's
# area.
HEXAGONAL_MOMENT = 5 / (36 * math.sqrt(3)) * math.sqrt(3) / 2


def dither(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, 1]).random(uniforms_needed(count))


def update(kind: str, count: int, seed: int = 0) -> NDArray[np.float32]:
    generator = np.random.default_rng([seed, 2])
    draws = {
        "normal": lambda: generator.normal(size=count),
        "laplace": lambda: generator.laplace(size=count),
        "heavy": lambda: generator.standard_t(3, size=count),
        "sparse": lambda: generator.normal(size=count) * (generator.random(count) < 0.5),
        "uniform": lambda: generator.uniform(-1, 1, size=count),
        "filters": lambda: (
            generator.normal(size=(16, -(-count // 16))) * np.exp(generator.normal(size=(16, 1)))
        ).ravel()[:count],
    }
    return np.asarray(draws[kind]() * 1e-3, np.float32)


def step_of(payload: UVeQFedPayload) -> float:
    return float(struct.unpack_from("<d", payload.data)[0])


def brute_force_nearest(x: float, y: float) -> float:
    """The distance to the nearest of all lattice points ``i * (1, 0) + j * (1/2, sqrt(3)/2)`` around."""
    rows = range(math.floor(y / (math.sqrt(3) / 2)) - 2, math.floor(y / (math.sqrt(3) / 2)) + 4)
    return min(
        math.hypot(x - i - j / 2, y - j * math.sqrt(3) / 2)
        for j in rows
        for i in range(math.floor(x - j / 2) - 2, math.floor(x - j / 2) + 4)
    )


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_the_nearest_point_is_the_nearest(x: float, y: float) -> None:
    point = lattice_points(*nearest_points(np.array([[x, y]])))[0]
    assert math.hypot(x - point[0], y - point[1]) == pytest.approx(brute_force_nearest(x, y), abs=1e-9)
    # It is a lattice point at all: whole coordinates in the basis.
    j = point[1] / (math.sqrt(3) / 2)
    assert abs(j - round(j)) < 1e-9
    assert abs(point[0] - j / 2 - round(point[0] - j / 2)) < 1e-9


@given(st.integers(-(2**30), 2**30), st.integers(-(2**30), 2**30))
def test_a_lattice_point_is_its_own_nearest(row: int, column: int) -> None:
    rows, columns = nearest_points(lattice_points(np.array([row]), np.array([column])))
    assert (rows[0], columns[0]) == (row, column)


@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "uniform"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_error_is_uniform_on_the_cell_whatever_the_update(kind: str, bits: int) -> None:
    delta = update(kind, 60_000, seed=bits)
    payload = encode(delta, bits, dither(delta.size, seed=bits))
    step = step_of(payload)
    error: Floats = (decode(payload, dither(delta.size, seed=bits)).astype(np.float64) - delta) / step
    pairs = error.reshape(-1, 2)
    # Inside the cell: no other lattice point is nearer, up to the rounding of the decoded float32.
    slack = float(np.abs(delta).max()) * 2**-22 / step
    at_zero = np.hypot(*pairs.T)
    nearest = np.hypot(*(pairs - lattice_points(*nearest_points(pairs))).T)
    assert (at_zero <= nearest + slack).all()
    # Unbiased; the right size in each direction; the directions uncorrelated; nothing to do with the input.
    spread = math.sqrt(HEXAGONAL_MOMENT / len(pairs))
    assert np.abs(pairs.mean(axis=0)).max() < 5 * spread
    covariance = pairs.T @ pairs / len(pairs)
    np.testing.assert_allclose(covariance, HEXAGONAL_MOMENT * np.eye(2), atol=0.03 * HEXAGONAL_MOMENT)
    assert abs(np.corrcoef(error, delta)[0, 1]) < 5 / math.sqrt(error.size)
    assert abs(np.corrcoef(error**2, np.abs(delta))[0, 1]) < 5 / math.sqrt(error.size)
    # Uniform on the cell is uniform modulo the lattice: count in an 8 by 8 grid over its parallelogram.
    across = pairs[:, 1] / (math.sqrt(3) / 2)
    along = pairs[:, 0] - across / 2
    cells = np.floor(along % 1 * 8).astype(int) % 8 * 8 + np.floor(across % 1 * 8).astype(int) % 8
    expected = len(pairs) / 64
    chi_square = float(((np.bincount(cells, minlength=64) - expected) ** 2 / expected).sum())
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy", "sparse", "uniform", "filters"])
@pytest.mark.parametrize(
    ("count", "bits"), [(10_000, 1), (10_000, 2), (10_000, 8), (36_864, 2.5), (36_865, 4)]
)
def test_the_payload_is_the_size_promised(kind: str, count: int, bits: float) -> None:
    delta = update(kind, count)
    payload = encode(delta, bits, dither(count))
    promised = bits * count / 8
    assert payload.nbytes - header_bytes(payload.data) == pytest.approx(promised, rel=0.03)
    assert header_bytes(payload.data) < 500


def header_bytes(payload: bytes) -> int:
    """Step, lane and word counts, and the histograms of both streams."""
    total, rest = 8, payload[8:]
    for _ in range(2):
        histograms, states, words, raw_at = parse(rest)
        total += raw_at - 4 * len(states) - 2 * len(words)
        raw = sum(count * max(cls // 4 - 1, 0) for row in histograms for cls, count in enumerate(row))
        rest = rest[raw_at + -(-raw // 8) :]
    assert rest == b""
    return total


def parse(data: bytes) -> tuple[list[list[int]], list[int], list[int], int]:
    """The stored form, read field by field: histograms, states, words, and where the raw bits begin."""
    at = 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value += byte % 128 << shift
            shift += 7
            if byte < 128:
                return value

    lanes = number()
    histograms = [[number() for _ in range(number())] for _ in range(number())]
    words = number()
    states = list(struct.unpack_from(f"<{lanes}I", data, at))
    at += 4 * lanes
    return histograms, states, list(struct.unpack_from(f"<{words}H", data, at)), at + 2 * words


def slow_decode(data: bytes, contexts: list[int]) -> list[int]:
    """The coder's decoder in whole numbers, one value at a time."""
    histograms, states, words, raw_at = parse(data)
    bits = "".join(f"{byte:08b}"[::-1] for byte in data[raw_at:])
    slots: list[list[tuple[int, int]]] = []
    for row in histograms:
        scaled = [max(1, count * 65536 // sum(row)) if count else 0 for count in row]
        if scaled:
            scaled[scaled.index(max(scaled))] += 65536 - sum(scaled)
        slots.append([(cls, offset) for cls, share in enumerate(scaled) for offset in range(share)])
        slots[-1] += [(-1, -1)] * (65536 - len(slots[-1]))
    shares = [Counter(cls for cls, _ in row) for row in slots]
    classes, taken = [], 0
    for position, context in enumerate(contexts):
        lane = position % len(states)
        cls, offset = slots[context][states[lane] % 65536]
        states[lane] = shares[context][cls] * (states[lane] // 65536) + offset
        if states[lane] < 65536:
            states[lane] = states[lane] * 65536 + words[taken]
            taken += 1
        classes.append(cls)
    values, at = [], 0
    for cls in classes:
        raw = max(cls // 4 - 1, 0)
        folded = (cls - 4 * raw) * 2**raw + (int(bits[at : at + raw][::-1], 2) if raw else 0)
        values.append(folded // 2 if folded % 2 == 0 else -(folded + 1) // 2)
        at += raw
    return values


def by_counting(values: list[int], contexts: list[int]) -> float:
    """The empirical entropy of the values themselves given their contexts, in bits."""
    groups: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for value, context in zip(values, contexts, strict=True):
        groups[context][value] += 1
    return sum(
        -count * math.log2(count / group.total()) for group in groups.values() for count in group.values()
    )


coded_values = st.lists(
    st.tuples(
        st.one_of(st.integers(-3, 3), st.integers(-200, 200), st.integers(1 - 2**40, 2**40 - 1)),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=200,
)


@given(coded_values, st.binary(max_size=5))
def test_the_coder_gives_back_what_it_was_given(pairs: list[tuple[int, int]], after: bytes) -> None:
    values = np.array([value for value, _ in pairs], np.int64)
    contexts = np.array([context for _, context in pairs], np.uint8)
    decoded, rest = entropy_coder.decode(entropy_coder.encode(values, contexts) + after, contexts)
    assert np.array_equal(decoded, values)
    assert decoded.dtype == np.int64
    assert rest == after


@settings(max_examples=15)
@given(coded_values)
def test_the_stored_form_is_the_one_described(pairs: list[tuple[int, int]]) -> None:
    values, contexts = zip(*pairs, strict=True)
    data = entropy_coder.encode(np.array(values, np.int64), np.array(contexts, np.uint8))
    assert slow_decode(data, list(contexts)) == list(values)


def test_many_lanes_and_a_ragged_end_are_decoded_by_the_slow_twin_too() -> None:
    generator = np.random.default_rng(9)
    values = np.rint(generator.laplace(scale=6, size=9001)).astype(np.int64)
    contexts = generator.integers(0, 3, 9001).astype(np.uint8)
    data = entropy_coder.encode(values, contexts)
    assert len(parse(data)[1]) > 5
    assert slow_decode(data, contexts.tolist()) == values.tolist()


@pytest.mark.parametrize("scale", [0.2, 1, 3])
def test_the_cost_is_the_entropy_and_the_size_is_the_cost(scale: float) -> None:
    generator = np.random.default_rng(4)
    values = np.rint(generator.normal(scale=scale, size=50_000)).astype(np.int64)
    contexts = generator.integers(0, 2, 50_000).astype(np.uint8)
    cost = entropy_coder.cost_bits(values, contexts)
    entropy = by_counting(values.tolist(), contexts.tolist())
    # Only magnitudes above 3 share classes; they cost a little where they are not quite equally common.
    assert entropy - 1e-6 <= cost <= entropy * 1.01
    assert cost / 8 <= len(entropy_coder.encode(values, contexts)) <= cost / 8 * 1.012 + 60


def test_a_constant_costs_next_to_nothing_and_no_more_time_than_noise() -> None:
    contexts = np.zeros(300_000, np.uint8)
    constant = np.full(300_000, -3, np.int64)
    noise = np.rint(np.random.default_rng(0).normal(scale=3, size=300_000)).astype(np.int64)
    data = entropy_coder.encode(constant, contexts)
    assert np.array_equal(entropy_coder.decode(data, contexts)[0], constant)
    assert len(data) < 400

    def both_ways(values: NDArray[np.int64]) -> None:
        entropy_coder.decode(entropy_coder.encode(values, contexts), contexts)

    # It took 1.7 times as long: a constant is one long run of the coder's carries.
    assert cpu_seconds(lambda: both_ways(constant)) < 6 * cpu_seconds(lambda: both_ways(noise))


def test_a_flipped_bit_in_the_coded_stream_is_noticed() -> None:
    values = np.rint(np.random.default_rng(6).normal(size=400)).astype(np.int64)
    contexts = np.zeros(400, np.uint8)
    data = entropy_coder.encode(values, contexts)
    _, states, words, end = parse(data)
    for position in range(end - 4 * len(states) - 2 * len(words), end):
        damaged = bytearray(data)
        damaged[position] ^= 16
        with pytest.raises(PayloadError):
            entropy_coder.decode(bytes(damaged), contexts)


def test_the_coder_refuses_what_it_cannot_store() -> None:
    one = np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="2\\^40"):
        entropy_coder.encode(np.array([2**40], np.int64), one)
    with pytest.raises(ValueError, match="context"):
        entropy_coder.encode(np.array([1], np.int64), one + 16)
    with pytest.raises(ValueError, match="equally long"):
        entropy_coder.encode(np.array([1, 2], np.int64), one)
    with pytest.raises(ValueError, match="not empty"):
        entropy_coder.encode(np.array([], np.int64), np.array([], np.uint8))


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    st.floats(1, 8),
    st.integers(0, 2**32 - 1),
)
def test_any_update_comes_back_within_a_cell(delta: NDArray[np.float32], bits: float, seed: int) -> None:
    payload = encode(delta, bits, dither(delta.size, seed))
    decoded = decode(payload, dither(delta.size, seed))
    assert decoded.shape == delta.shape
    assert decoded.dtype == np.float32
    # No point of a cell is farther from its centre than its corners, 1 / sqrt 3.
    slack = np.abs(delta).max() * 2.0**-22 + 2.0**-149
    assert (np.abs(decoded.astype(np.float64) - delta) <= step_of(payload) / math.sqrt(3) + slack).all()


def test_an_update_of_zeros_is_a_step_of_zero() -> None:
    payload = encode(np.zeros((3, 5), np.float32), 2, dither(15))
    assert payload == UVeQFedPayload((3, 5), bytes(8))
    decoded = decode(payload, dither(15))
    assert decoded.shape == (3, 5)
    assert not decoded.any()


@pytest.mark.parametrize("value", [-0.7, 1e-40, 1e30])
def test_a_single_weight_survives(value: float) -> None:
    delta = np.array([[value]], np.float32)
    payload = encode(delta, 8, dither(1))
    assert decode(payload, dither(1))[0, 0] == pytest.approx(value, rel=0.1)


def test_one_giant_among_dwarfs_is_stored_within_the_search() -> None:
    delta = update("normal", 2001)
    delta[7] = 1e25
    payload = encode(delta, 8, dither(delta.size))
    decoded = decode(payload, dither(delta.size))
    assert decoded[7] == pytest.approx(1e25, rel=1e-6)
    assert payload.nbytes < 2001 + 500


def test_an_update_nearly_all_of_zeros_costs_less_than_its_budget() -> None:
    delta = np.zeros(20_001, np.float32)
    delta[::100] = update("normal", 201)
    payload = encode(delta, 8, dither(delta.size))
    assert payload.nbytes < 3000
    np.testing.assert_allclose(decode(payload, dither(delta.size)), delta, atol=1e-11, rtol=1e-6)


def test_more_bits_mean_a_finer_step() -> None:
    delta = update("laplace", 20_000)
    steps = [step_of(encode(delta, bits, dither(delta.size))) for bits in (1, 1.5, 2, 3, 4, 6, 8)]
    assert steps == sorted(steps, reverse=True)
    # At high rate one bit a weight halves the step.
    assert steps[-2] / steps[-1] == pytest.approx(4, rel=0.02)


def test_the_same_input_gives_the_same_bytes_and_another_dither_does_not_decode_it() -> None:
    delta = update("normal", 5000)
    payload = encode(delta, 4, dither(delta.size))
    assert payload == encode(delta.copy(), 4, dither(delta.size))
    right = decode(payload, dither(delta.size))
    wrong = decode(payload, dither(delta.size, seed=1))
    assert np.square(wrong - delta).mean() > 1.9 * np.square(right - delta).mean()


def test_time_grows_no_faster_than_the_model() -> None:
    def both_ways(count: int) -> float:
        delta, noise = update("heavy", count), dither(count)
        return cpu_seconds(lambda: decode(encode(delta, 4, noise), noise), repetitions=3)

    # Ten times the weights took 2.3 times as long; work for every pair of weights would take 100 times.
    assert both_ways(270_000) < 30 * both_ways(27_000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(UpdateError, match="NaN"):
        encode(np.array([1.0, bad], np.float32), 4, dither(2))


def test_other_bad_input_is_refused() -> None:
    delta = np.ones(5, np.float32)
    for bits in (0.5, 8.5, math.nan):
        with pytest.raises(UpdateError, match="bits is"):
            encode(delta, bits, dither(5))
    with pytest.raises(UpdateError, match="needs exactly 6"):
        encode(delta, 2, dither(5)[:5])
    with pytest.raises(UpdateError, match=r"\[0, 1\)"):
        encode(delta, 2, dither(5) + 1)
    with pytest.raises(UpdateError, match="no weights"):
        encode(np.zeros((0, 3), np.float32), 2, dither(0))
    with pytest.raises(PayloadError, match="no weights"):
        decode(UVeQFedPayload((0, 3), bytes(8)), dither(0))


def test_a_payload_cut_short_or_drawn_out_is_refused() -> None:
    payload = encode(update("normal", 301), 3, dither(301))
    for length in range(payload.nbytes):
        with pytest.raises(PayloadError):
            decode(replace(payload, data=payload.data[:length]), dither(301))
    with pytest.raises(PayloadError, match="follow"):
        decode(replace(payload, data=payload.data + b"\0"), dither(301))
    with pytest.raises(PayloadError, match="histograms"):
        decode(replace(payload, shape=(299,)), dither(299))
    with pytest.raises(PayloadError, match="step"):
        decode(replace(payload, data=struct.pack("<d", math.nan) + payload.data[8:]), dither(301))


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_a_damaged_payload_is_refused_or_decodes_but_never_breaks(data: st.DataObject) -> None:
    delta = update("heavy", 400)
    payload = bytearray(encode(delta, 2, dither(400)).data)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(8, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(UVeQFedPayload((400,), bytes(payload)), dither(400))
    except PayloadError:
        return
    assert decoded.shape == (400,)
