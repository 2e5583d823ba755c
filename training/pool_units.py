"""Pools and Flatten in training: codes to codes, nothing learnt."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound_shapes
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.tensors import Pool as Pooling
from fedmpq.model.pools import Windows, windows_of
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.native_plan import FlattenUnit, PoolUnit

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class PoolForward:
    """A pool whose forward call is bound."""

    unit: PoolUnit
    source: Tensor
    target: Tensor
    windows: Windows
    pool: Pooling
    multipliers: Vector
    """What an average multiplies the sum of codes under each window by."""
    run: Call

    @classmethod
    def bind(cls, unit: PoolUnit, binding: Binding) -> PoolForward:
        source = binding.tensors[unit.source]
        windows = windows_of(unit.op, source.shape)
        spans = ([(span.start, span.stop) for span in each] for each in (windows.rows, windows.columns))
        pool = Pooling.over(source.images, source.shape, *spans)
        low, high, number = source.low, source.high, source.number
        if not unit.takes_greatest:
            averaged = source.form.averaged()
            low, high, number = averaged.low, averaged.high, c_float()
        shape = pool.channels, pool.out_height, pool.out_width
        target = binding.new_tensor(source.images, shape, low, high, number)
        binding.tensors[unit.output] = target
        multipliers, threads = np.zeros(pool.pixels, np.float32), binding.threads
        run = (
            bound_shapes.max_pool(pool, source.codes, threads, target.buffer)
            if unit.takes_greatest
            else bound_shapes.average_pool(pool, source.codes, multipliers, low, high, threads, target.buffer)
        )
        return cls(unit, source, target, windows, pool, multipliers, binding.bind(run))

    def bind_backward(self, binding: Binding) -> Pool:
        error = binding.errors.pop(self.unit.output)
        if self.unit.source in binding.unlearnt:
            return Pool(self, ())
        pool, threads = self.pool, binding.threads
        out = binding.layout.buffer(pool.images * pool.inputs, np.uint16)
        spread = binding.bind(
            bound_shapes.max_pool_backward(pool, self.source.codes, error, threads, out)
            if self.unit.takes_greatest
            else bound_shapes.average_pool_backward(pool, error, self._shares(), threads, out)
        )
        added = binding.deliver(self.unit.source, out)
        return Pool(self, (spread,) if added is None else (spread, added))

    def forward_only(self) -> Pool:
        return Pool(self, ())

    def _shares(self) -> Vector:
        """The share of a mean's error that each element under its window takes."""
        return np.float32(1) / self.windows.sizes().astype(np.float32).reshape(-1)


class Pool(StepUnit):
    """The greatest or the mean under a window; the greatest keeps the scale."""

    def __init__(self, forward: PoolForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = (forward.run,), backward

    def settle(self, scratch: Scratch) -> Pool:
        return self

    def prepare(self) -> None:
        this = self.bound
        if not this.unit.takes_greatest:
            form = this.source.form
            this.target.scale = float(form.averaged().scale)
            this.multipliers[...] = form.averaging(this.windows.sizes()).reshape(-1)


@dataclass(frozen=True)
class FlattenForward:
    """A Flatten whose place in memory is chosen."""

    unit: FlattenUnit
    source: Tensor
    target: Tensor
    in_place: bool
    """Whether there is one pixel, so that codes need no new order."""

    @classmethod
    def bind(cls, unit: FlattenUnit, binding: Binding) -> FlattenForward:
        source = binding.tensors[unit.source]
        in_place = source.shape[1:] == (1, 1)
        shape = source.elements, 1, 1
        if in_place:
            target = Tensor(source.buffer, source.low, source.high, source.images, shape, source.number)
        else:
            target = binding.new_tensor(source.images, shape, source.low, source.high, source.number)
            binding.layout.use(source.buffer, target.buffer)
        binding.tensors[unit.output] = target
        return cls(unit, source, target, in_place)

    def bind_backward(self, binding: Binding) -> Flattening:
        error = out = binding.errors.pop(self.unit.output)
        if not self.in_place:
            out = binding.layout.buffer(error.count, np.uint16)
            binding.layout.use(error, out)
        return Flattening(self, FlattenBackward(error, out, binding.deliver(self.unit.source, out)))

    def forward_only(self) -> Flattening:
        return Flattening(self, None)


@dataclass(frozen=True)
class FlattenBackward:
    """The way of a Flatten's errors, bound."""

    error: Buffer
    out: Buffer
    add: Call | None


class Flattening(StepUnit):
    """Channels, then rows, then columns."""

    def __init__(self, forward: FlattenForward, backward: FlattenBackward | None) -> None:
        self.bound = forward
        self.forward = () if forward.in_place else (self._turn,)
        self._back = backward
        if backward is not None:
            added = () if backward.add is None else (backward.add,)
            self.backward = added if forward.in_place else (self._turn_errors, *added)

    def settle(self, scratch: Scratch) -> Flattening:
        return self

    def _turn(self) -> None:
        source, target = self.bound.source, self.bound.target
        channels, height, width = source.shape
        rows = source.unpaired().reshape(-1, height, width, channels)
        codes = rows.transpose(0, 3, 1, 2).reshape(source.images, -1)
        target.buffer.array[...] = _paired(codes, target.pairs)

    def _turn_errors(self) -> None:
        back = self._back
        assert back is not None
        channels, height, width = self.bound.source.shape
        turned = back.error.array.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        np.copyto(back.out.array.reshape(turned.shape), turned)


def _paired(codes: NDArray[np.uint8], pairs: bool) -> NDArray[np.uint8]:
    if not pairs:
        return codes.reshape(-1)
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return np.asarray(padded[:, 0::2] | (padded[:, 1::2] << 4), dtype=np.uint8).reshape(-1)
