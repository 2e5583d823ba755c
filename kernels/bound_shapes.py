"""Pools, and what joins codes and moves them about, as bound calls (`call`)."""

from __future__ import annotations

from ctypes import c_uint32

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import Call, CheckedCall, Elements, Number
from fedmpq.kernels.memory import Memory
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Counter, Pool, StoredCodes


def max_pool(pool: Pool, codes: StoredCodes, threads: int, out: Memory) -> Call:
    room = StoredCodes.nbytes(pool.images, pool.outputs, codes.pairs)
    source = codes.struct(pool.images, pool.inputs)
    return CheckedCall("fedmpq_max_pool", pool, source, threads, Elements(out, room))


def max_pool_backward(pool: Pool, codes: StoredCodes, error: Memory, threads: int, out: Memory) -> Call:
    return CheckedCall(
        "fedmpq_max_pool_backward",
        pool,
        codes.struct(pool.images, pool.inputs),
        Elements(error, pool.images * pool.outputs),
        threads,
        Elements(out, pool.images * pool.inputs),
    )


def average_pool(
    pool: Pool, codes: StoredCodes, multipliers: Memory, low: int, high: int, threads: int, out: Memory
) -> Call:
    """`multipliers` has one for each output pixel."""
    return CheckedCall(
        "fedmpq_average_pool",
        pool,
        codes.struct(pool.images, pool.inputs),
        Elements(multipliers, pool.pixels),
        low,
        high,
        threads,
        Elements(out, pool.images * pool.outputs),
    )


def average_pool_backward(pool: Pool, error: Memory, shares: Memory, threads: int, out: Memory) -> Call:
    """`shares` has one for each output pixel."""
    return CheckedCall(
        "fedmpq_average_pool_backward",
        pool,
        Elements(error, pool.images * pool.outputs),
        Elements(shares, pool.pixels),
        threads,
        Elements(out, pool.images * pool.inputs),
    )


def join(
    codes: StoredCodes,
    extent: FedmpqExtent,
    multiplier: Number,
    low: int,
    high: int,
    start: int,
    channels: int,
    threads: int,
    out: Memory,
) -> Call:
    """Codes of another scale into the channels `start` and on of `out`, which has `channels` a pixel."""
    return CheckedCall(
        "fedmpq_join",
        codes.struct(extent.images, extent.pixels * extent.channels),
        extent,
        multiplier,
        low,
        high,
        start,
        channels,
        threads,
        Elements(out, extent.images * extent.pixels * channels),
    )


def part_errors(
    error: Memory, extent: FedmpqExtent, start: int, channels: int, threads: int, out: Memory
) -> Call:
    """The errors of the channels `start` and on into `out`, which is as large as `extent` says."""
    return CheckedCall(
        "fedmpq_part_errors",
        Elements(error, extent.images * extent.pixels * channels),
        extent,
        start,
        channels,
        threads,
        Elements(out, extent.images * extent.pixels * extent.channels),
    )


def drop(
    codes: StoredCodes,
    extent: FedmpqExtent,
    whole: bool,
    rate: float,
    counter: Counter,
    purpose: int,
    step: c_uint32,
    threads: int,
    out: Memory,
) -> Call:
    """Codes that are dropped become 0; `step` is read when the call is made, in place of the counter's."""
    count = extent.pixels * extent.channels
    return CheckedCall(
        "fedmpq_drop",
        codes.struct(extent.images, count),
        extent,
        int(whole),
        rate,
        *counter.stream(purpose, step),
        threads,
        Elements(out, StoredCodes.nbytes(extent.images, count, codes.pairs)),
    )


def drop_errors(
    extent: FedmpqExtent,
    whole: bool,
    rate: float,
    factor: float,
    counter: Counter,
    purpose: int,
    step: c_uint32,
    threads: int,
    error: Memory,
) -> Call:
    """In place: errors of codes that `drop` drops become 0, the others are multiplied by `factor`."""
    return CheckedCall(
        "fedmpq_drop_errors",
        extent,
        int(whole),
        rate,
        factor,
        *counter.stream(purpose, step),
        threads,
        Elements(error, extent.images * extent.pixels * extent.channels),
    )


def rearrange(
    codes: StoredCodes, images: int, count: int, places: NDArray[np.int32], threads: int, out: Memory
) -> Call:
    """Element i of an image is element `places[i]` of its `count`, or code 0 where that is -1."""
    return CheckedCall(
        "fedmpq_rearrange",
        codes.struct(images, count),
        images,
        count,
        Elements(places, places.size),
        places.size,
        threads,
        Elements(out, StoredCodes.nbytes(images, places.size, codes.pairs)),
    )


def rearrange_backward(
    error: Memory, images: int, count: int, places: NDArray[np.int32], threads: int, out: Memory
) -> Call:
    return CheckedCall(
        "fedmpq_rearrange_backward",
        Elements(error, images * places.size),
        images,
        count,
        Elements(places, places.size),
        places.size,
        threads,
        Elements(out, images * count),
    )
