"""A static entropy coder for signed integers: interleaved rANS, with its histograms in the header.

Small magnitudes are symbols of their own. Larger ones are split, as in a floating-point number, into a class
(the exponent and two leading bits) and raw low bits, which are all but uniform; so the histogram stays short
however wide the values spread. Each value is coded under a context the decoder knows beforehand, with one
histogram per context.

rANS (Duda 2013): a symbol with frequency ``f`` and cumulative frequency ``c``, of ``2^16``, turns the state
``x`` into ``(x // f) * 2^16 + x % f + c``; the state stays in ``[2^16, 2^32)`` by moving its low 16 bits out
to the stream. Value ``i`` belongs to lane ``i % lanes``; all lanes step together, which is what lets NumPy
run it.

Stored form, integers as LEB128 varints unless said otherwise: ``lanes; contexts; per context: length, counts
of classes 0..length-1; words;`` then the lanes' final states (u32 little endian), the stream's words (u16
little endian), the raw low bits (lowest first, no gaps, one byte-aligned end).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.compression import PayloadError

# Magnitudes from here on are refused, which bounds the number of classes and so the header.
MAX_MAGNITUDE = 2**40

_MANTISSA_BITS = 2
_MAX_CLASSES = 176
_MAX_CONTEXTS = 16

_PRECISION = 16
_TOTAL = 2**_PRECISION
_WORD_BITS = 16
_LOWEST_STATE = 2**16

# A lane wastes some 3 bytes on its final state: this much coded text per lane keeps that under 1 percent.
_BYTES_PER_LANE = 384
# Text that costs next to nothing would else run in one lane, one NumPy step per value.
_MAX_STEPS = 4096


def cost_bits(values: NDArray[np.int64], contexts: NDArray[np.uint8]) -> float:
    """Bits to code the values, header aside: the classes' empirical entropy per context, and the raw bits."""
    split = _Split.of(values)
    return _entropy_bits(_histograms(split.classes, contexts)) + float(split.raw_bits.sum())


def encode(values: NDArray[np.int64], contexts: NDArray[np.uint8]) -> bytes:
    """Code a flat vector of integers, each under its context (small numbers, one histogram each)."""
    if values.shape != contexts.shape or values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"values {values.shape} and contexts {contexts.shape} must be flat, equally long, not empty"
        )
    if contexts.max() >= _MAX_CONTEXTS or np.abs(values).max() >= MAX_MAGNITUDE:
        raise ValueError(
            f"a context exceeds {_MAX_CONTEXTS - 1} or a magnitude reaches 2^40; coarsen the values"
        )
    split = _Split.of(values)
    counts = _histograms(split.classes, contexts)
    lanes = max(1, round(_entropy_bits(counts) / 8 / _BYTES_PER_LANE), -(-values.size // _MAX_STEPS))
    states, words = _rans_encode(split.classes, contexts, _Model.of(counts), lanes)
    header = [lanes, len(counts)]
    for row in counts:
        length = int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0
        header += [length, *row[:length].tolist()]
    header.append(words.size)
    parts = (
        _varints(header),
        states.astype("<u4").tobytes(),
        words.astype("<u2").tobytes(),
        split.packed_raw(),
    )
    return b"".join(parts)


def decode(data: bytes, contexts: NDArray[np.uint8]) -> tuple[NDArray[np.int64], bytes]:
    """The values that were coded under these contexts, and the bytes that follow them."""
    numbers = _VarintReader(data)
    lanes = numbers.next(limit=contexts.size)
    counts = np.zeros((numbers.next(limit=_MAX_CONTEXTS), _MAX_CLASSES), np.int64)
    for row in counts:
        length = numbers.next(limit=_MAX_CLASSES)
        row[:length] = [numbers.next(limit=contexts.size) for _ in range(length)]
    word_count = numbers.next(limit=len(data))
    expected = np.bincount(contexts, minlength=len(counts))
    if lanes == 0 or not np.array_equal(expected, counts.sum(axis=1)):
        raise PayloadError(f"the histograms do not count the {contexts.size} values of these contexts")
    head, rest = _take(numbers.rest(), 4 * lanes)
    stream, rest = _take(rest, 2 * word_count)
    states, words = (np.frombuffer(*part).astype(np.uint64) for part in ((head, "<u4"), (stream, "<u2")))
    classes = _rans_decode(states, words, contexts, _Model.of(counts))
    return _Split.unpack(classes, rest)


@dataclass(frozen=True)
class _Split:
    """Integers as classes and raw low bits.

    A value ``v`` is folded to ``u = 2v`` for ``v >= 0``, else ``-2v - 1``. Below 8 the class is ``u``;
    above, it says how many bits ``u`` has and which two follow the leading one, and the rest are raw.
    """

    folded: NDArray[np.int64]
    classes: NDArray[np.int64]
    raw_bits: NDArray[np.int64]

    @staticmethod
    def of(values: NDArray[np.int64]) -> _Split:
        folded = np.where(values >= 0, 2 * values, -2 * values - 1)
        # frexp is exact below 2^53; an exponent of two or less leaves no raw bits.
        exponent = np.maximum(np.frexp(folded.astype(np.float64))[1].astype(np.int64) - 1, _MANTISSA_BITS)
        raw_bits = exponent - _MANTISSA_BITS
        # u >> raw_bits keeps the leading one; counting it makes the classes of neighbouring exponents adjoin.
        classes = (folded >> raw_bits) + (raw_bits << _MANTISSA_BITS)
        return _Split(folded, classes, raw_bits)

    def packed_raw(self) -> bytes:
        shift = _bit_positions(self.raw_bits)
        bits = (np.repeat(self.folded, self.raw_bits) >> shift) & 1
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    @staticmethod
    def unpack(classes: NDArray[np.int64], data: bytes) -> tuple[NDArray[np.int64], bytes]:
        raw_bits = np.maximum((classes >> _MANTISSA_BITS) - 1, 0)
        total = int(raw_bits.sum())
        packed, rest = _take(data, -(-total // 8))
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=total, bitorder="little").astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(bits << _bit_positions(raw_bits))))
        ends = np.cumsum(raw_bits)
        # The running sum may wrap around; the difference of two of its values does not care.
        raw = sums[ends] - sums[ends - raw_bits]
        folded = ((classes - (raw_bits << _MANTISSA_BITS)) << raw_bits) + raw
        return np.where(folded % 2 == 0, folded // 2, -(folded + 1) // 2), rest


def _bit_positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``0..n-1`` for each length ``n``, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _histograms(classes: NDArray[np.int64], contexts: NDArray[np.uint8]) -> NDArray[np.int64]:
    rows = int(contexts.max()) + 1
    flat = np.bincount(contexts.astype(np.int64) * _MAX_CLASSES + classes, minlength=rows * _MAX_CLASSES)
    return flat.reshape(rows, _MAX_CLASSES)


def _entropy_bits(counts: NDArray[np.int64]) -> float:
    """``sum over contexts of n * log2 n - sum c * log2 c``: the total, not per value."""
    totals = counts.sum(axis=1)
    return float(
        (totals * np.log2(np.maximum(totals, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum()
    )


@dataclass(frozen=True)
class _Model:
    """Frequencies (of ``2^16``) and cumulative frequencies, one row per context and a last row for padding.

    The padding row gives its one symbol the whole range, so that it costs nothing and changes no state.
    """

    frequency: NDArray[np.uint64]
    cumulative: NDArray[np.uint64]

    @staticmethod
    def of(counts: NDArray[np.int64]) -> _Model:
        padded = np.zeros((len(counts) + 1, _MAX_CLASSES), np.int64)
        padded[:-1] = counts
        # An unused context gets a model all the same; it is never asked.
        padded[padded.sum(axis=1) == 0, 0] = 1
        frequency = np.maximum(padded * _TOTAL // padded.sum(axis=1, keepdims=True), padded > 0)
        # The commonest class can give or take the rounding: with at most 176 classes it has 372 or more.
        rows = np.arange(len(frequency))
        frequency[rows, frequency.argmax(axis=1)] += _TOTAL - frequency.sum(axis=1)
        cumulative = np.cumsum(frequency, axis=1) - frequency
        return _Model(frequency.astype(np.uint64), cumulative.astype(np.uint64))

    def lookup(self) -> NDArray[np.uint8]:
        """The class at each of the ``2^16`` slots, per context, laid end to end."""
        classes = np.arange(_MAX_CLASSES, dtype=np.uint8)
        return np.concatenate([np.repeat(classes, row) for row in self.frequency.astype(np.int64)])

    def padded_contexts(self, contexts: NDArray[np.uint8], lanes: int) -> NDArray[np.int64]:
        """The contexts as rows of one step of all lanes, filled up with the padding context."""
        steps = -(-contexts.size // lanes)
        padded = np.full(steps * lanes, len(self.frequency) - 1, np.int64)
        padded[: contexts.size] = contexts
        return padded.reshape(steps, lanes)


def _rans_encode(
    classes: NDArray[np.int64], contexts: NDArray[np.uint8], model: _Model, lanes: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    rows = model.padded_contexts(contexts, lanes)
    index = rows * _MAX_CLASSES
    index.reshape(-1)[: classes.size] += classes
    frequency, cumulative = model.frequency.ravel()[index], model.cumulative.ravel()[index]
    ceiling = frequency << np.uint64(32 - _PRECISION)
    word_bits, precision = np.uint64(_WORD_BITS), np.uint64(_PRECISION)
    before = np.empty(rows.shape, np.uint64)
    state = np.full(lanes, _LOWEST_STATE, np.uint64)
    # Backwards, because a decoder undoes the last symbol first.
    for step in range(len(rows) - 1, -1, -1):
        before[step] = state
        state = np.where(state >= ceiling[step], state >> word_bits, state)
        quotient, remainder = np.divmod(state, frequency[step])
        state = (quotient << precision) + remainder + cumulative[step]
    # Row by row is the order in which the decoder asks for words.
    return state, before[before >= ceiling] & np.uint64(2**_WORD_BITS - 1)


def _rans_decode(
    states: NDArray[np.uint64], words: NDArray[np.uint64], contexts: NDArray[np.uint8], model: _Model
) -> NDArray[np.int64]:
    rows = model.padded_contexts(contexts, len(states))
    lookup, frequency, cumulative = model.lookup(), model.frequency.ravel(), model.cumulative.ravel()
    tables, slots = rows * _MAX_CLASSES, rows.astype(np.uint64) << np.uint64(_PRECISION)
    mask, precision, word_bits = np.uint64(_TOTAL - 1), np.uint64(_PRECISION), np.uint64(_WORD_BITS)
    classes = np.empty(rows.shape, np.int64)
    state, used = states, 0
    for step in range(len(rows)):
        slot = state & mask
        classes[step] = lookup[slots[step] + slot]
        index = tables[step] + classes[step]
        state = frequency[index] * (state >> precision) + slot - cumulative[index]
        low = np.flatnonzero(state < _LOWEST_STATE)
        if used + low.size > words.size:
            raise PayloadError("the coded stream ends before its last value")
        state[low] = (state[low] << word_bits) | words[used : used + low.size]
        used += low.size
    if used != words.size or (state != _LOWEST_STATE).any():
        raise PayloadError("the coded stream does not end where its encoder began; it is damaged")
    return classes.reshape(-1)[: contexts.size]


def _take(data: bytes, size: int) -> tuple[bytes, bytes]:
    if len(data) < size:
        raise PayloadError(f"{len(data)} bytes are left where {size} are needed; the payload is cut short")
    return data[:size], data[size:]


def _varints(numbers: list[int]) -> bytes:
    out = bytearray()
    for number in numbers:
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


class _VarintReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def next(self, limit: int) -> int:
        number = 0
        for shift in range(0, 35, 7):
            if self._at == len(self._data):
                raise PayloadError("the payload ends within its header; it is cut short")
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        if number > limit:
            raise PayloadError(f"a header entry is {number}; at most {limit} is possible here")
        return number

    def rest(self) -> bytes:
        return self._data[self._at :]
