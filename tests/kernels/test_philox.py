import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
word = st.integers(0, 2**32 - 1)

FULL = 0xFFFFFFFF
# The known answers for philox4x32, 10 rounds, published with Random123: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """One block in unbounded integers, after the paper's description."""
    left, right, (c0, c1, c2, c3) = *key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ left, low1, high0 ^ c3 ^ right, low0
        left, right = (left + 0x9E3779B9) % 2**32, (right + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def uniform_by_python(
    n: int, seed: int, client: int, round: int, layer: int, step: int, purpose: int
) -> NDArray[np.float32]:
    numbers: list[int] = []
    for block in range((n + 3) // 4):
        numbers += philox_by_python((block, step, round, layer * 16 + purpose), (seed, client))
    return np.array([(x >> 8) / 2**24 for x in numbers[:n]], np.float32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(kernels.philox_block(counter, key)) == expected
    assert philox_by_python(counter, key) == expected


@per_isa
@given(
    st.integers(0, 150),
    st.tuples(word, word, word, st.integers(0, 2**28 - 1), word, st.integers(0, 15)),
)
def test_uniform_equals_the_reference(
    isa: str, n: int, coordinates: tuple[int, int, int, int, int, int]
) -> None:
    drawn = kernels.philox_uniform(n, *coordinates)
    assert drawn.dtype == np.float32
    np.testing.assert_array_equal(drawn, uniform_by_python(n, *coordinates))


def test_a_prefix_is_the_same_whatever_the_length(isa: str) -> None:
    long = kernels.philox_uniform(100_003, 1, 2, 3, 4, 5, 6)
    for n in [1, 15, 16, 17, 31, 33, 4096, 99_999]:
        np.testing.assert_array_equal(kernels.philox_uniform(n, 1, 2, 3, 4, 5, 6), long[:n])


def test_numbers_are_uniform_in_the_half_open_unit_interval(isa: str) -> None:
    numbers = kernels.philox_uniform(1_000_000, 7, 0, 0, 0, 0, 0)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 16).astype(np.int64), minlength=16)
    # Sixteen bins of 62,500: the standard deviation of one is 242.
    assert np.abs(counts - 62_500).max() < 5 * 242


def test_every_coordinate_gives_another_stream() -> None:
    base = [1, 1, 1, 1, 1, 1]
    streams = {kernels.philox_uniform(8, *base).tobytes()}
    for i in range(6):
        changed = base.copy()
        changed[i] += 1
        streams.add(kernels.philox_uniform(8, *changed).tobytes())
    assert len(streams) == 7


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("n", 2**34),
        ("seed", 2**32 - 1),
        ("client", 2**32 - 1),
        ("round", 2**32 - 1),
        ("layer", 2**28 - 1),
        ("step", 2**32 - 1),
        ("purpose", 15),
    ],
)
def test_coordinates_out_of_range_are_named(name: str, limit: int) -> None:
    arguments = {"n": 1, "seed": 0, "client": 0, "round": 0, "layer": 0, "step": 0, "purpose": 0}
    for bad in (-1, limit + 1):
        with pytest.raises(ValueError, match=rf"{name} is {bad}; it must lie in 0\.\.{limit}"):
            kernels.philox_uniform(**{**arguments, name: bad})


def test_a_block_takes_four_counter_and_two_key_words() -> None:
    with pytest.raises(ValueError, match="4 counter and 2 key words, not 3 and 2"):
        kernels.philox_block((0, 0, 0), (0, 0))
