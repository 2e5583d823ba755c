"""Scales for XNNPACK: exact for every input, or not taken."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.export.xnnpack_scales import MIN_MULTIPLIER, choose_scales
from fedmpq.model.integer_program import compile_program
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


def takes_integer_additions(seed: int, activation_bits: int) -> bool:
    model = deployed("digits_cnn", (4,), seed, activation_bits=activation_bits)
    program = compile_program(model.graph, model.layers, model.side)
    return choose_scales(program, tuple(operations(program, model.layers))).integer_additions


def test_sums_of_many_codes_are_not_always_exact_in_integers() -> None:
    """With 8 bits a code there are 255 ties to miss for each of 65,025 pairs, with 4 bits 15."""
    narrow = [takes_integer_additions(seed, 4) for seed in range(10)]
    wide = [takes_integer_additions(seed, 8) for seed in range(10)]
    assert sum(narrow) >= 8
    assert sum(wide) <= 8
