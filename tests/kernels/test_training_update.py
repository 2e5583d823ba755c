"""The update of codes equals, to the bit, the NumPy one of the edge client, which states the formulas."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Counter, MomentumBuffer
from fedmpq.model import grid
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.training import update
from fedmpq.training.momentum import Momentum, make_momentum
from tests.kernels import training_calls as training

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Codes = NDArray[np.uint8]
Fractions = NDArray[np.int8]
Floats = NDArray[np.float32]
CLIENT, ROUND, LAYER, DECAY = 3, 4, 5, 5e-4


@dataclass(frozen=True)
class Rule:
    bits: int
    paper: bool
    momentum: float
    momentum_bits: int
    lasso: float
    seed: int

    @property
    def counter(self) -> Counter:
        return Counter(self.seed, CLIENT, ROUND, LAYER, 0)


rules = st.builds(
    Rule,
    bits=st.integers(1, 8),
    paper=st.booleans(),
    momentum=st.sampled_from([0.9, 0.5]),
    momentum_bits=st.sampled_from([0, 8, 32]),
    lasso=st.sampled_from([0.0, 0.3, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)


def by_numpy(
    rule: Rule, codes: Codes, fractions: Fractions, gradient: Floats, step: Floats, rate: Floats,
    pull: Floats | None, at: int, momentum: Momentum,
) -> tuple[Codes, Fractions]:  # fmt: skip
    draws = Draws(rule.seed, CLIENT, ROUND)
    row = codes.size // step.size
    weights = grid.dequantize(codes.reshape(step.size, row), step, rule.bits).reshape(-1)
    direction = momentum.push(gradient + np.float32(DECAY) * weights)
    rates = np.repeat(rate, row)
    uniforms = draws.uniform(codes.size, Purpose.UPDATE, layer=LAYER, step=at)
    if rule.paper:
        codes = update.paper_update(codes, direction, rates, rule.bits, uniforms)
        if pull is None:
            return codes, fractions
        uniforms = draws.uniform(codes.size, Purpose.LASSO, layer=LAYER, step=at)
        return update.lasso_update(codes, pull, rule.bits, uniforms), fractions
    with np.errstate(over="ignore"):
        move = direction * rates
    return update.carried_update(codes, fractions, move, rule.bits, uniforms)


def by_kernel(
    rule: Rule, codes: Codes, fractions: Fractions, gradient: Floats, step: Floats, rate: Floats,
    pull: Floats | None, at: int, buffer: MomentumBuffer,
) -> bool:  # fmt: skip
    counter = Counter(rule.seed, CLIENT, ROUND, LAYER, at)
    return training.update_codes(
        codes,
        gradient,
        bits=rule.bits,
        fractions=None if rule.paper else fractions,
        step=step,
        rate=rate,
        weight_decay=DECAY,
        momentum=rule.momentum,
        buffer=buffer,
        pull=pull,
        counter=counter,
    )


@per_isa
@given(
    rules,
    st.sampled_from([(1, 1), (1, 127), (1, 129), (1, 1025), (3, 5), (17, 61), (4, 700)]),
    st.sampled_from([1e-30, 1e-4, 1e-1, 10.0, 1e30]),
)
def test_three_updates_equal_numpy(isa: str, rule: Rule, shape: tuple[int, int], size: float) -> None:
    rng = np.random.default_rng(rule.seed)
    low, high = grid.code_range(rule.bits)
    codes = rng.integers(low, high + 1, shape[0] * shape[1]).astype(np.uint8)
    step = rng.uniform(0.01, 0.1, shape[0]).astype(np.float32)
    rate = rng.uniform(0.1, 2, shape[0]).astype(np.float32)
    pull = update.lasso_pull(codes, rule.bits, rule.lasso) if rule.lasso else None
    momentum = make_momentum(codes.size, rule.momentum, rule.momentum_bits)
    buffer = MomentumBuffer.zeros(codes.size, rule.momentum_bits)
    fractions = rng.integers(-128, 128, codes.size).astype(np.int8)
    expected, expected_fractions = codes.copy(), fractions.copy()
    for at in range(3):
        gradient = (rng.normal(size=codes.size) * size).astype(np.float32)
        gradient[::5] = 0
        expected, expected_fractions = by_numpy(
            rule, expected, expected_fractions, gradient, step, rate, pull, at, momentum
        )
        assert by_kernel(rule, codes, fractions, gradient, step, rate, pull, at, buffer)
        np.testing.assert_array_equal(codes, expected)
        np.testing.assert_array_equal(fractions, expected_fractions)


@per_isa
@given(st.integers(1, 8), st.integers(-70, 40), st.integers(-3, 3), st.integers(0, 1000))
def test_the_papers_exponent_rounds_as_numpy_does(
    isa: str, bits: int, exponent: int, offset: int, seed: int
) -> None:
    """Directions within a few units of where `round(log2)` changes: sqrt(1/2) times a power of two."""
    rule = Rule(bits, True, 0.0, 0, 0.0, seed)
    edge = np.float32(np.sqrt(0.5)).view(np.int32) + np.int32(offset)
    direction = np.ldexp(np.full(200, edge).view(np.float32), exponent)
    low, high = grid.code_range(bits)
    codes = np.random.default_rng(seed).integers(low, high + 1, 200).astype(np.uint8)
    weightless = np.full(1, 2.0**-30, np.float32)  # keeps the decay out of the last bits
    one = np.ones(1, np.float32)
    momentum = make_momentum(200, 0.0, 0)
    still = np.zeros(200, np.int8)
    expected, _ = by_numpy(rule, codes, still, direction, weightless, one, None, 0, momentum)
    buffer = MomentumBuffer.zeros(200, 0)
    assert by_kernel(rule, codes, still, direction, weightless, one, None, 0, buffer)
    np.testing.assert_array_equal(codes, expected)


def one_weight(rule: Rule, gradient: float, rate: float) -> tuple[int, int]:
    """What the kernel and NumPy make of 200 equal gradients, as sums of codes and fractions."""
    codes, fractions = np.full(200, 2 ** (rule.bits - 1), np.uint8), np.zeros(200, np.int8)
    gradients = np.full(200, gradient, np.float32)
    step, rates = np.full(1, 0.1, np.float32), np.full(1, rate, np.float32)
    momentum = make_momentum(200, rule.momentum, rule.momentum_bits)
    with np.errstate(over="ignore"):
        expected, expected_fractions = by_numpy(
            rule, codes, fractions, gradients, step, rates, None, 0, momentum
        )
    buffer = MomentumBuffer.zeros(200, rule.momentum_bits)
    assert by_kernel(rule, codes, fractions, gradients, step, rates, None, 0, buffer)
    return place(codes, fractions), place(expected, expected_fractions)


def place(codes: Codes, fractions: Fractions) -> int:
    return int(256 * codes.astype(np.int64).sum() + fractions.astype(np.int64).sum())


@pytest.mark.parametrize("paper", [True, False])
@pytest.mark.parametrize("gradient", [3e38, -3e38, 1e-40, 0.0])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
def test_gradients_at_the_ends_of_float32(isa: str, paper: bool, gradient: float, momentum_bits: int) -> None:
    """Times the rate they pass float32's range, or lie among its denormals."""
    for bits in (1, 4, 8):
        rule = Rule(bits, paper, 0.9, momentum_bits, 0.0, 1)
        got, expected = one_weight(rule, gradient, 1e10)
        assert got == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("paper", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(isa: str, bad: float, paper: bool) -> None:
    codes = np.full(2000, 7, np.uint8)
    gradient = np.ones(2000, np.float32)
    gradient[1999] = bad
    ones = np.ones(1, np.float32)
    rule = Rule(4, paper, 0.9, 32, 0.0, 1)
    buffer = MomentumBuffer.zeros(2000, 32)
    fractions = np.full(2000, 3, np.int8)
    assert not by_kernel(rule, codes, fractions, gradient, ones, ones, None, 0, buffer)
    assert (codes == 7).all()
    assert (fractions == 3).all()
    assert not buffer.codes.any()


@pytest.mark.parametrize("momentum_bits", [8, 32])
def test_a_momentum_that_overflows_is_told(isa: str, momentum_bits: int) -> None:
    codes, gradient, ones = np.full(200, 7, np.uint8), np.full(200, 3e38, np.float32), np.ones(1, np.float32)
    rule = Rule(4, False, 0.9, momentum_bits, 0.0, 1)
    buffer = MomentumBuffer.zeros(200, momentum_bits)
    fractions = np.zeros(200, np.int8)
    assert by_kernel(rule, codes, fractions, gradient, ones, ones, None, 0, buffer)
    assert not by_kernel(rule, codes, fractions, gradient, ones, ones, None, 1, buffer)


def test_tables_and_steps_of_the_wrong_length_are_refused() -> None:
    codes, gradient, ones = np.full(6, 7, np.uint8), np.ones(6, np.float32), np.ones(1, np.float32)
    rule = Rule(4, True, 0.0, 0, 0.0, 1)
    buffer, still = MomentumBuffer.zeros(6, 0), np.zeros(6, np.int8)
    with pytest.raises(ValueError, match="the Lasso's table has 7 entries; 4 bits need 8"):
        by_kernel(rule, codes, still, gradient, ones, ones, np.zeros(7, np.float32), 0, buffer)
    four = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="4 steps do not divide 6 weights"):
        by_kernel(rule, codes, still, gradient, four, four, None, 0, buffer)
    with pytest.raises(ValueError, match="a buffer of 5 int8 where 6 contiguous int8 are due"):
        by_kernel(replace(rule, paper=False), codes, still[:5], gradient, ones, ones, None, 0, buffer)


@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
@pytest.mark.parametrize("paper", [True, False])
def test_threads_change_nothing(isa: str, momentum_bits: int, paper: bool) -> None:
    """Rows and parts that threads share end at different weights."""
    rows, row = 7, 5003
    rng = np.random.default_rng(momentum_bits)
    start = rng.integers(0, 16, rows * row).astype(np.uint8)
    gradient = rng.normal(size=start.size).astype(np.float32)
    step, rate = (rng.uniform(0.1, 1, rows).astype(np.float32) for _ in range(2))
    results = set()
    for threads in (1, 2, 3):
        codes, fractions = start.copy(), np.zeros(start.size, np.int8)
        buffer = MomentumBuffer.zeros(start.size, momentum_bits)
        for at in range(2):
            assert training.update_codes(
                codes,
                gradient,
                bits=4,
                fractions=None if paper else fractions,
                step=step,
                rate=rate,
                weight_decay=DECAY,
                momentum=0.9,
                buffer=buffer,
                pull=np.full(8, 0.01, np.float32),
                counter=Counter(3, CLIENT, ROUND, LAYER, at),
                threads=threads,
            )
        results.add((codes.tobytes(), fractions.tobytes(), np.asarray(buffer.codes).tobytes()))
    assert len(results) == 1


def test_a_weak_pull_moves_the_codes_whose_number_is_close_enough_to_one(isa: str) -> None:
    """Pulls around what the greatest random number of all lacks to 1: one code moves, or none does."""
    count, bits = 5000, 4
    uniforms = Draws(3, CLIENT, ROUND).uniform(count, Purpose.LASSO, layer=LAYER, step=7)
    lacking = np.float32(1) - uniforms.max()
    codes = np.full(count, 15, np.uint8)
    moved = set()
    for pull in (lacking / 4, np.nextafter(lacking, np.float32(0)), lacking, 2 * lacking, np.float32(1e-3)):
        table, got = np.full(1 << (bits - 1), pull, np.float32), codes.copy()
        assert training.update_codes(
            got,
            np.zeros(count, np.float32),
            bits=bits,
            fractions=None,
            step=np.ones(1, np.float32),
            rate=np.ones(1, np.float32),
            weight_decay=0.0,
            momentum=0.0,
            buffer=MomentumBuffer.zeros(count, 0),
            pull=table,
            counter=Counter(3, CLIENT, ROUND, LAYER, 7),
        )
        np.testing.assert_array_equal(got, update.lasso_update(codes, table, bits, uniforms))
        moved.add(int((got != codes).sum()))
    assert {0, 1} < moved
