"""What the training kernels work on: shapes, codes, momentum, and the memory they lie in.

`include/fedmpq/training.h` states how tensors are stored.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAX_TAPS = 1024
MAX_THREADS = 64
MOMENTUM_BLOCK = 128

Floats = NDArray[np.float32]


class Conv(ctypes.Structure):
    """`FedmpqConv`: a convolution or a pool."""

    _fields_ = [
        (name, c_int32)
        for name in (
            *("images", "height", "width", "channels", "out_height", "out_width", "out_channels"),
            *(
                "kernel_h",
                "kernel_w",
                "stride_h",
                "stride_w",
                "pad_h",
                "pad_w",
                "dilation_h",
                "dilation_w",
                "groups",
            ),
        )
    ]

    @classmethod
    def over(
        cls,
        images: int,
        shape: tuple[int, int, int],
        kernel: tuple[int, ...] = (1, 1),
        stride: tuple[int, ...] = (1, 1),
        padding: tuple[int, ...] = (0, 0),
        dilation: tuple[int, ...] = (1, 1),
        out_channels: int | None = None,
        groups: int = 1,
    ) -> Conv:
        """A window over images of `shape` (channels, height, width); as many channels out as in by default.

        Each output size is `(size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1`. A linear layer
        is a window of one pixel over images of one pixel.
        """
        channels, *size = shape
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
        ]
        outputs = channels if out_channels is None else out_channels
        return cls(images, *size, channels, *sizes, outputs, *kernel, *stride, *padding, *dilation, groups)

    @property
    def inputs(self) -> int:
        """Elements of one input image."""
        return int(self.height * self.width * self.channels)

    @property
    def outputs(self) -> int:
        """Elements of one output image."""
        return int(self.out_height * self.out_width * self.out_channels)

    @property
    def pixels(self) -> int:
        return int(self.out_height * self.out_width)

    @property
    def weights(self) -> int:
        return int(self.out_channels * (self.channels // self.groups) * self.kernel_h * self.kernel_w)


class Buffer:
    """`count` elements of `dtype` that lie wherever `put` says, also after a call was bound to them."""

    def __init__(self, count: int, dtype: DTypeLike) -> None:
        self.count = count
        self.dtype = np.dtype(dtype)
        self.pointer = c_void_p()

    def put(self, array: NDArray[Any]) -> None:
        """From now on calls find their elements in `array`, which the buffer keeps."""
        self.pointer.value = address(array, self.dtype, self.count)
        self.array = array

    def drop(self) -> None:
        """Let go of the array; nothing may be called until the next one is put."""
        self.pointer.value = None
        del self.array


Memory = NDArray[Any] | Buffer


@dataclass(frozen=True)
class StoredCodes:
    """A batch of codes in an array or a buffer: bytes `code + zero`, or two 4-bit ones a byte."""

    data: Any
    pairs: bool
    zero: int

    @staticmethod
    def nbytes(images: int, elements: int, pairs: bool) -> int:
        return images * ((elements + 1) // 2 if pairs else elements)


class CodeUpdate(ctypes.Structure):
    """`FedmpqUpdate`: how the codes of one layer are updated."""

    _fields_ = [
        ("bits", c_int32),
        ("count", c_int64),
        ("row", c_int64),
        ("step", c_void_p),
        ("rate", c_void_p),
        ("weight_decay", c_float),
        ("momentum", c_float),
        ("momentum_bits", c_int32),
        ("momentum_codes", c_void_p),
        ("momentum_scales", c_void_p),
        ("fractions", c_void_p),
        ("pull", c_void_p),
        ("step_number", c_uint32),
        ("round", c_uint32),
        ("layer", c_uint32),
        ("seed", c_uint32),
        ("client", c_uint32),
    ]

    @classmethod
    def of(
        cls,
        count: int,
        *,
        bits: int,
        step: Floats,
        rate: Floats,
        weight_decay: float,
        momentum: float,
        buffer: MomentumBuffer,
        fractions: NDArray[np.int8] | None = None,
        counter: Counter,
    ) -> CodeUpdate:
        """`step` and `rate` have one element, or one for each of as many equal rows of the weights.

        With `fractions`, 256ths of a code beside each code, the rule is "carried", else the paper's.
        """
        if step.size not in (1, 0) and count % step.size:
            raise ValueError(f"{step.size} steps do not divide {count} weights")
        update = cls(
            bits=bits,
            count=count,
            row=count // max(1, step.size),
            step=address(step, np.float32, step.size),
            rate=address(rate, np.float32, step.size),
            weight_decay=weight_decay,
            momentum=momentum,
            momentum_bits=buffer.bits,
            momentum_codes=buffer.codes.ctypes.data,
            momentum_scales=buffer.scales.ctypes.data,
            fractions=None if fractions is None else address(fractions, np.int8, count),
            step_number=counter.step,
            round=counter.round,
            layer=counter.layer,
            seed=counter.seed,
            client=counter.client,
        )
        update._kept = step, rate, buffer, fractions
        return update

    def pull_by(self, table: Floats | None) -> None:
        """The Lasso's pull, codes towards zero for each magnitude; None for no pull."""
        if table is not None and table.size != 1 << (self.bits - 1):
            raise ValueError(
                f"the Lasso's table has {table.size} entries; {self.bits} bits need {1 << (self.bits - 1)}"
            )
        self.pull = None if table is None else address(table, np.float32, table.size)
        self._table = table


@dataclass(frozen=True)
class Counter:
    """Where in the random numbers of a run a draw stands."""

    seed: int
    client: int
    round: int
    layer: int
    step: int


@dataclass
class MomentumBuffer:
    """Momentum of one layer in the form that `fedmpq_update_codes` keeps it."""

    bits: int
    codes: NDArray[Any]
    scales: Floats

    @classmethod
    def zeros(cls, count: int, bits: int) -> MomentumBuffer:
        blocks = -(-count // MOMENTUM_BLOCK)
        if bits == 32:
            return cls(bits, np.zeros(count, np.float32), np.zeros(0, np.float32))
        if bits == 8:
            return cls(bits, np.zeros(blocks * MOMENTUM_BLOCK, np.int8), np.zeros(blocks, np.float32))
        return cls(0, np.zeros(0, np.int8), np.zeros(0, np.float32))


@dataclass(frozen=True)
class Rescale:
    """`t = acc * scale + shift` per channel; codes are `clamp(rint(t), low, high)`.

    Both vectors are float32, arrays or buffers.
    """

    scale: Any
    shift: Any
    low: int
    high: int


def pointer(memory: Memory, dtype: DTypeLike, count: int) -> int | c_void_p:
    """What a call is given for `memory`; one of another type or too small must never reach the library."""
    if not isinstance(memory, Buffer):
        return address(memory, dtype, count)
    if memory.dtype != dtype or memory.count < count:
        raise _misfit(memory.count, memory.dtype, count, dtype)
    return memory.pointer


def address(array: NDArray[Any], dtype: DTypeLike, count: int) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous or array.size < count:
        raise _misfit(array.size, array.dtype, count, dtype)
    # Several times faster than array.ctypes.
    found: int = array.__array_interface__["data"][0]
    return found


def _misfit(size: int, dtype: DTypeLike, due: int, due_dtype: DTypeLike) -> ValueError:
    return ValueError(f"a buffer of {size} {dtype} where {due} contiguous {np.dtype(due_dtype)} are due")
