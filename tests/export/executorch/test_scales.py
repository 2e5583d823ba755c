"""Scales for XNNPACK: exact for every input, or not taken."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpq.export.executorch.additions import IN_INTEGERS, exact_factor
from fedmpq.export.executorch.scales import MIN_MULTIPLIER, choose_scales
from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal, compile_program
from tests.export.models import deployed


@pytest.mark.parametrize("seed", range(8))
def test_multipliers_are_the_programs(seed: int) -> None:
    model = deployed("resnet8", (3, 8, 1, 5), seed, per_channel=True)
    program = compile_program(model.graph, model.layers, model.side)
    steps = tuple(operations(program, model.layers))
    scales = choose_scales(program, steps)
    for step in steps:
        if not isinstance(step, RoundedLayer):
            continue
        before, after = scales.of(step.sums.source), scales.of(step.output)
        got = (before * scales.weights[step.output]) / after
        assert got.dtype == np.float32
        assert (got >= MIN_MULTIPLIER).all()
        # A channel whose BatchNorm factor is 0 gives its offset whatever the sum.
        alive = np.abs(step.sums.bias) < 2**24
        np.testing.assert_array_equal(got[alive], np.maximum(step.multiplier, MIN_MULTIPLIER)[alive])


@pytest.mark.parametrize("activation_bits", [4, 8])
def test_additions_keep_the_programs_scales(activation_bits: int) -> None:
    """In integers where those are exact for every pair of codes; with 8 bits a code that is not always."""
    factors: list[np.float32] = []
    kept = 0
    for seed in range(10):
        model = deployed("digits_cnn", (4,), seed, activation_bits=activation_bits)
        program = compile_program(model.graph, model.layers, model.side)
        scales = choose_scales(program, tuple(operations(program, model.layers)))
        kept += scales.own
        factors += scales.factors.values()
    # A channel whose BatchNorm factor is 0 can have a multiplier that XNNPACK cannot.
    assert kept >= 8
    in_integers = factors.count(IN_INTEGERS)
    assert in_integers == len(factors) if activation_bits == 4 else 0 < in_integers < len(factors)
    assert all(factor == IN_INTEGERS or abs(factor - 1) < 1e-5 for factor in factors)


def test_an_addition_without_an_exact_factor_is_refused() -> None:
    """A third of a code off: the scales it goes by are not those it is checked against."""
    codes = {name: CodeFormat(np.float32(0.1), -127, 127) for name in "aby"}
    add = AddCodes("sum", "a", "b", np.float32(0.1), np.float32(0.1))
    rounding = QuantizeReal("y", "sum", np.float32(0.1), -127, 127)
    scales = {name: np.float32(0.1) for name in codes}
    assert exact_factor(add, rounding, codes, scales) == IN_INTEGERS
    assert exact_factor(add, rounding, codes, scales | {"y": np.float32(0.13)}) is None


def test_a_factor_does_for_processors_that_round_the_last_product_and_for_others() -> None:
    """With a factor of 1 the codes 45 and 27 lie on a tie, which a fused product and a rounded one break
    differently."""
    s_a, s_b, s_y = (np.float32(scale) for scale in (0.057712268, 0.048604704, 0.049801007))
    codes = {"a": CodeFormat(s_a, -127, 127), "b": CodeFormat(s_b, -127, 127), "y": CodeFormat(s_y, 0, 255)}
    add = AddCodes("sum", "a", "b", s_a, s_b)
    rounding = QuantizeReal("y", "sum", s_y, 0, 255)
    factor = exact_factor(add, rounding, codes, {"a": s_a, "b": s_b, "y": s_y})
    assert factor is not None
    real = np.float32(45) * s_a + np.float32(27) * s_b
    wanted, inverse = np.rint(real / s_y), np.float32(1) / s_y
    assert np.rint(np.float64(real) * np.float64(inverse)) != wanted
    assert np.rint(np.float64(real * factor) * np.float64(inverse)) == wanted
    assert np.rint(real * factor * inverse) == wanted
