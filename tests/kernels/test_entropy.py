"""Entropy codes against a coder in plain Python integers, and bytes that are none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import decode_codes, encode_codes
from fedmpq.kernels.call import KernelError

SANITIZED = Path(__file__).resolve().parents[2] / "build" / "sanitized"
ROOM = 1 << 16
SCALE, LEAST, STATES = 4096, 1 << 16, 4


def frequencies(codes: list[int], bits: int) -> list[int]:
    counts = [codes.count(symbol) for symbol in range(2**bits)]
    found = [max(1, count * SCALE // len(codes)) if count else 0 for count in counts]
    if sum(found) <= SCALE:
        found[counts.index(max(counts))] += SCALE - sum(found)
    while sum(found) > SCALE:
        found[found.index(max(found))] -= 1
    return found


def table(found: list[int]) -> bytes:
    halves = []
    for frequency in found:
        digits = [frequency >> shift & 7 for shift in range(0, max(1, frequency.bit_length()), 3)]
        halves += [digit | 8 for digit in digits[:-1]] + digits[-1:]
    halves += [0] * (len(halves) % 2)
    return bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))


def reference(codes: list[int], bits: int) -> bytes:
    """Symbol after symbol from the last to the first, each into the state of its place."""
    found = frequencies(codes, bits)
    states, words = [LEAST] * STATES, []
    for place in reversed(range(len(codes))):
        state, frequency = states[place % STATES], found[codes[place]]
        if state >= frequency << 20:
            words.append(state & 0xFFFF)
            state >>= 16
        start = sum(found[: codes[place]])
        states[place % STATES] = state // frequency * SCALE + state % frequency + start
    parts = [state.to_bytes(4, "little") for state in states]
    return table(found) + b"".join(parts + [word.to_bytes(2, "little") for word in reversed(words)])


@st.composite
def some_codes(draw: st.DrawFn) -> tuple[list[int], int]:
    bits = draw(st.integers(1, 8))
    one = st.one_of(st.integers(0, 2**bits - 1), st.just(2 ** (bits - 1)))
    return draw(st.lists(one, min_size=1, max_size=300)), bits


@settings(deadline=None)
@given(some_codes())
def test_codes_are_those_of_the_plain_coder_and_come_back(made: tuple[list[int], int]) -> None:
    codes, bits = made
    coded = encode_codes(np.array(codes, np.uint8), bits, ROOM)
    assert coded == reference(codes, bits)
    assert decode_codes(coded, len(codes), bits).tolist() == codes


def skewed(count: int, bits: int) -> NDArray[np.uint8]:
    draws = np.random.default_rng(count).laplace(2 ** (bits - 1), 2**bits / 9, count)
    return np.clip(draws, 0, 2**bits - 1).astype(np.uint8)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_a_code_is_hardly_longer_than_its_entropy(bits: int) -> None:
    codes = skewed(36_864, bits)
    shares = np.bincount(codes) / codes.size
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() * codes.size / 8
    coded = encode_codes(codes, bits, codes.size)
    assert coded is not None
    assert len(coded) < entropy * 1.003 + 16 + 2**bits
    np.testing.assert_array_equal(decode_codes(coded, codes.size, bits), codes)


def test_codes_of_one_kind_take_a_table_and_four_states() -> None:
    coded = encode_codes(np.full((10, 1000), 5, np.uint8)[:, ::2], 3, ROOM)
    assert coded is not None
    assert len(coded) == 6 + 16
    assert set(decode_codes(coded, 5000, 3).tolist()) == {5}


def test_what_does_not_fit_is_no_code() -> None:
    even = np.arange(4096, dtype=np.uint8) % 16
    assert encode_codes(even, 4, 2048) is None
    for room in range(24):
        assert encode_codes(np.array([1, 2], np.uint8), 4, room) is None
    with pytest.raises(KernelError):
        encode_codes(np.array([16], np.uint8), 4, ROOM)
    with pytest.raises(KernelError):
        encode_codes(np.empty(0, np.uint8), 4, ROOM)
    with pytest.raises(ValueError, match=r"1\.\.8 bits"):
        encode_codes(even, 9, ROOM)


@pytest.mark.parametrize(
    ("coded", "count", "bits"),
    [
        (b"", 1, 1),
        (b"\x00", 4, 1),
        # Frequencies that add up to 4095, one of them longer than it must be, and bits behind the last.
        (table([4095, 0]) + bytes(4 * [0, 0, 1, 0]), 4, 1),
        (b"\x88\x88\x01" + bytes(20), 4, 1),
        (table([4096, 0])[:-1] + bytes([table([4096, 0])[-1] | 0xF0]) + bytes(4 * [0, 0, 1, 0]), 4, 1),
        # A state below the least, one word too many, one too few, and another number of codes.
        (table([2048, 2048]) + bytes(16), 4, 1),
        (reference([1, 0, 1, 1], 1) + b"\x00\x00", 4, 1),
        (reference(list(range(16)) * 9, 4)[:-2], 144, 4),
        (reference([1, 0, 1, 1], 1), 5, 1),
    ],
)
def test_bytes_that_are_no_code_are_refused(coded: bytes, count: int, bits: int) -> None:
    with pytest.raises(ValueError, match="are not the code of"):
        decode_codes(coded, count, bits)


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(1, 200), st.integers(1, 8))
def test_any_bytes_are_a_code_or_refused(data: bytes, count: int, bits: int) -> None:
    try:
        codes = decode_codes(data, count, bits)
    except ValueError:
        return
    assert codes.shape == (count,)
    assert codes.max() < 2**bits


@pytest.mark.skipif(not (SANITIZED / "fuzz_decode_codes").exists(), reason="built by `make sanitize`")
def test_mutated_codes_are_refused_or_decoded_under_the_sanitizers() -> None:
    """FEDMPQ_FUZZ_SECONDS bounds it in time; 10 million inputs take some three minutes of a core."""
    seconds = os.environ.get("FEDMPQ_FUZZ_SECONDS", "2")
    command = [str(SANITIZED / "fuzz_decode_codes"), "10000000", seconds, "1"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    tried, taken = (int(part.split()[0]) for part in ended.stdout.split(","))
    assert tried > 10_000
    assert 0 < taken < tried
