import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels

# The fixture only sets which twin runs; it holds nothing that one example could leave to the next.
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

Codes = NDArray[np.uint8]


def random_codes(m: int, bits: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 2**bits, m, dtype=np.uint8)


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[Codes, int]:
    """Codes of any width and length, contiguous or a strided or reversed view."""
    bits = draw(st.integers(1, 8))
    stride = draw(st.sampled_from([1, 2, 3, -1]))
    m = draw(st.integers(0, 700))
    return random_codes(m * abs(stride), bits, draw(st.integers(0, 2**32 - 1)))[::stride], bits


def packed_by_numpy(codes: Codes, bits: int) -> Codes:
    return np.stack([np.packbits((codes >> i) & 1, bitorder="little") for i in range(bits)])


def magnitudes(codes: Codes, bits: int) -> NDArray[np.int64]:
    half = 2 ** (bits - 1)
    wide = codes.astype(np.int64)
    magnitude: NDArray[np.int64] = np.where(wide >= half, wide - half, half - 1 - wide)
    return magnitude


@per_isa
@given(codes_and_bits())
def test_pack_equals_packbits_of_each_bit(isa: str, drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    planes = kernels.pack_planes(codes, bits)
    assert planes.dtype == np.uint8
    np.testing.assert_array_equal(planes, packed_by_numpy(codes, bits))


@per_isa
@given(codes_and_bits())
def test_unpack_undoes_packbits(isa: str, drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    np.testing.assert_array_equal(kernels.unpack_planes(packed_by_numpy(codes, bits), codes.size), codes)


@per_isa
@given(codes_and_bits())
def test_popcount_counts_codes_with_the_bit(isa: str, drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    expected = [int(((codes >> i) & 1).sum()) for i in range(bits)]
    assert kernels.popcount_planes(packed_by_numpy(codes, bits)).tolist() == expected


@per_isa
@given(codes_and_bits())
def test_magnitude_counts_follow_the_formula(isa: str, drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    expected = [int(((magnitudes(codes, bits) >> i) & 1).sum()) for i in range(bits - 1)]
    assert kernels.magnitude_counts(codes, bits).tolist() == expected


@pytest.mark.parametrize("m", [4095, 4096, 4097, 3 * 4096 + 5, 100_003])
def test_lengths_around_tiles_and_blocks(isa: str, m: int) -> None:
    codes = random_codes(m, 5)
    planes = kernels.pack_planes(codes, 5)
    np.testing.assert_array_equal(planes, packed_by_numpy(codes, 5))
    np.testing.assert_array_equal(kernels.unpack_planes(planes, m), codes)
    counts = [int(((magnitudes(codes, 5) >> i) & 1).sum()) for i in range(4)]
    assert kernels.magnitude_counts(codes, 5).tolist() == counts


def test_codes_of_any_shape_are_read_in_c_order(isa: str) -> None:
    codes = random_codes(3 * 5 * 7, 4).reshape(3, 5, 7).transpose(2, 0, 1)
    np.testing.assert_array_equal(kernels.pack_planes(codes, 4), packed_by_numpy(codes.reshape(-1), 4))


def test_planes_may_be_a_strided_view(isa: str) -> None:
    codes = random_codes(1001, 3)
    planes = packed_by_numpy(codes, 3)
    view = np.repeat(planes, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(kernels.unpack_planes(view, 1001), codes)


@per_isa
@given(st.integers(1, 7), st.integers(1, 400), st.data())
def test_a_code_too_large_is_named(isa: str, bits: int, m: int, data: st.DataObject) -> None:
    codes = random_codes(m, bits)
    bad = data.draw(st.lists(st.integers(0, m - 1), min_size=1))
    codes[bad] = 2**bits
    message = f"code {2**bits} at index {min(bad)} is too large: {bits} bits hold 0..{2**bits - 1}"
    with pytest.raises(ValueError, match=message):
        kernels.pack_planes(codes, bits)
    with pytest.raises(ValueError, match=message):
        kernels.magnitude_counts(codes, bits)


@per_isa
@given(st.integers(1, 8), st.integers(1, 400).filter(lambda m: m % 8 != 0), st.data())
def test_a_padding_bit_set_is_refused(isa: str, bits: int, m: int, data: st.DataObject) -> None:
    planes = kernels.pack_planes(random_codes(m, bits), bits)
    plane = data.draw(st.integers(0, bits - 1))
    planes[plane, -1] |= 1 << data.draw(st.integers(m % 8, 7))
    with pytest.raises(ValueError, match=f"plane {plane} has padding bits set after weight {m - 1}"):
        kernels.unpack_planes(planes, m)


@pytest.mark.parametrize("bits", [-1, 0, 9, 64])
def test_bits_outside_1_to_8_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"bits is {bits}; a code has 1\.\.8 bits"):
        kernels.pack_planes(np.zeros(4, np.uint8), bits)
    with pytest.raises(ValueError, match=r"1\.\.8 bits"):
        kernels.magnitude_counts(np.zeros(4, np.uint8), bits)


def test_planes_beyond_8_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bits is 9; a code has 1\.\.8 bits"):
        kernels.unpack_planes(np.zeros((9, 1), np.uint8), 8)


@pytest.mark.parametrize("codes", [np.zeros(4, np.int64), np.zeros(4, np.int8), [0, 1]])
def test_only_uint8_is_taken(codes: Codes) -> None:
    with pytest.raises(TypeError, match="codes must be a NumPy array of uint8"):
        kernels.pack_planes(codes, 2)


@pytest.mark.parametrize("m", [-1, 7 * 8, 9 * 8, 2**40])
def test_planes_of_the_wrong_length_are_refused(m: int) -> None:
    with pytest.raises(ValueError, match="bytes each, not 8"):
        kernels.unpack_planes(np.zeros((2, 8), np.uint8), m)


def test_planes_must_be_a_matrix() -> None:
    with pytest.raises(ValueError, match="shape"):
        kernels.popcount_planes(np.zeros(8, np.uint8))
