"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).

A number is a function of its coordinates alone, so every engine draws the same ones, in any order,
on any machine.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import CheckedCall, Elements

MAX_LAYER = 2**28 - 1
MAX_PURPOSE = 15
MAX_NUMBERS = 2**34
MAX_WORD = 2**32 - 1


def philox_block(counter: Sequence[int], key: Sequence[int]) -> NDArray[np.uint32]:
    """The four 32-bit words of one block: Philox4x32-10(counter of 4 words, key of 2 words)."""
    if len(counter) != 4 or len(key) != 2:
        raise ValueError(f"Philox4x32 takes 4 counter and 2 key words, not {len(counter)} and {len(key)}")
    counter_words = np.array([_word("counter", c) for c in counter], np.uint32)
    key_words = np.array([_word("key", k) for k in key], np.uint32)
    out = np.empty(4, np.uint32)
    words = Elements(counter_words, 4), Elements(key_words, 2), Elements(out, 4)
    CheckedCall("fedmpq_philox4x32", *words)()
    return out


def philox_uniform(
    n: int, seed: int, client: int, round: int, layer: int, step: int, purpose: int
) -> NDArray[np.float32]:
    """n numbers in [0, 1).

    Block j = Philox4x32-10(counter = (j, step, round, layer*16 + purpose), key = (seed, client)) gives
    numbers 4j..4j+3, each u = (x >> 8) * 2^-24.
    """
    n = _checked("n", n, MAX_NUMBERS)
    stream = _checked("layer", layer, MAX_LAYER) * (MAX_PURPOSE + 1) + _checked(
        "purpose", purpose, MAX_PURPOSE
    )
    counter = (_word("step", step), _word("round", round), stream)
    key = (_word("seed", seed), _word("client", client))
    out = np.empty(n, np.float32)
    CheckedCall("fedmpq_philox_uniform", n, *counter, *key, Elements(out, n))()
    return out


def _checked(name: str, value: int, maximum: int) -> int:
    value = operator.index(value)
    if not 0 <= value <= maximum:
        raise ValueError(f"{name} is {value}; it must lie in 0..{maximum}")
    return value


def _word(name: str, value: int) -> int:
    return _checked(name, value, MAX_WORD)
