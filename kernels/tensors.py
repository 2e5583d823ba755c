"""What the training kernels work on: shapes, codes, momentum.

`include/fedmpq/training.h` states how tensors are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.memory import Memory
from fedmpq.kernels.prototypes import (
    FedmpqCodes,
    FedmpqConv,
    FedmpqNormalize,
    FedmpqPool,
    FedmpqRescale,
    FedmpqUpdate,
)

MAX_THREADS = 64
MOMENTUM_BLOCK = 128

Floats = NDArray[np.float32]


class Conv(FedmpqConv):
    """A convolution."""

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


class Pool(FedmpqPool):
    """Windows over images, each with so many rows and columns of the image under it."""

    @classmethod
    def over(
        cls,
        images: int,
        shape: tuple[int, int, int],
        rows: Sequence[tuple[int, int]],
        columns: Sequence[tuple[int, int]],
    ) -> Pool:
        """Of images of `shape` (channels, height, width); spans are `(start, stop)`, `stop` left out."""
        channels, height, width = shape
        pool = cls(images, height, width, channels, len(rows), len(columns))
        for name, spans in (("rows", rows), ("columns", columns)):
            pool.point(name, np.array(spans, np.int32).reshape(-1), 2 * len(spans))
        return pool

    @property
    def inputs(self) -> int:
        """Elements of one input image."""
        return int(self.height * self.width * self.channels)

    @property
    def outputs(self) -> int:
        """Elements of one output image."""
        return self.pixels * int(self.channels)

    @property
    def pixels(self) -> int:
        return int(self.out_height * self.out_width)


@dataclass(frozen=True)
class StoredCodes:
    """A batch of codes in an array or a buffer: bytes `code + zero`, or two 4-bit ones a byte."""

    data: Any
    pairs: bool
    zero: int

    def struct(self, images: int, elements: int) -> FedmpqCodes:
        """For a call that reads so many codes of so many images."""
        codes = FedmpqCodes(pairs=self.pairs, zero=self.zero)
        codes.point("data", self.data, self.nbytes(images, elements, self.pairs))
        return codes

    @staticmethod
    def nbytes(images: int, elements: int, pairs: bool) -> int:
        return images * ((elements + 1) // 2 if pairs else elements)


@dataclass(frozen=True)
class WeightCodes:
    """A layer's weights as codes, a byte each; `bits`, of which they are, is read when a call is made."""

    codes: NDArray[np.uint8]
    bits: c_uint32


class CodeUpdate(FedmpqUpdate):
    """How the codes of one layer are updated."""

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
            weight_decay=weight_decay,
            momentum=momentum,
            momentum_bits=buffer.bits,
            momentum_codes=buffer.codes.ctypes.data,
            round=counter.round,
            layer=counter.layer,
            seed=counter.seed,
            client=counter.client,
        )
        update.memory = {"momentum_codes": buffer.codes}
        update.point("step", step, step.size)
        update.point("rate", rate, step.size)
        update.point("momentum_scales", buffer.scales, buffer.scales.size)
        if fractions is not None:
            update.point("fractions", fractions, count)
        return update

    def pull_by(self, table: Floats | None) -> None:
        """The Lasso's pull, codes towards zero for each magnitude; None for no pull."""
        if table is not None and table.size != 1 << (self.bits - 1):
            raise ValueError(
                f"the Lasso's table has {table.size} entries; {self.bits} bits need {1 << (self.bits - 1)}"
            )
        if table is None:
            self.pull = None
        else:
            self.point("pull", table, table.size)


@dataclass(frozen=True)
class Counter:
    """Where in the random numbers of a run a draw stands.

    Seed, client and round may be ctypes numbers, which are read when a call is made.
    """

    seed: int | c_uint32
    client: int | c_uint32
    round: int | c_uint32
    layer: int
    step: int

    def stream(self, purpose: int, step: c_uint32 | None = None) -> tuple[int | c_uint32, ...]:
        """A kernel's c1, c2, c3, k0 and k1; `step` is read when it is called, in place of the counter's."""
        number = self.step if step is None else step
        return number, self.round, self.layer * 16 + purpose, self.seed, self.client


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

    def clear(self) -> None:
        """No momentum any more."""
        self.codes[...] = 0
        self.scales[...] = 0


@dataclass(frozen=True)
class Rescale:
    """`t = acc * scale + shift` per channel; codes are `clamp(rint(t), low, high)`.

    Both vectors are float32, arrays or buffers.
    """

    scale: Any
    shift: Any
    low: int
    high: int

    def struct(self, channels: int) -> FedmpqRescale:
        rescale = FedmpqRescale(low=self.low, high=self.high)
        rescale.point("scale", self.scale, channels)
        rescale.point("shift", self.shift, channels)
        return rescale


@dataclass(frozen=True)
class Normalize:
    """`acc * norm + bias` per channel: what BatchNorm normalizes."""

    norm: Memory
    bias: Memory

    def struct(self, channels: int) -> FedmpqNormalize:
        normalize = FedmpqNormalize()
        normalize.point("norm", self.norm, channels)
        normalize.point("bias", self.bias, channels)
        return normalize
