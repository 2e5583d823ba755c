"""Additions, pools and Flatten in training."""

from __future__ import annotations

import math
from ctypes import c_float

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.tensors import Buffer, Conv
from fedmpq.model.activations import CodeFormat, code_bounds
from fedmpq.model.graph import INPUT, AvgPool, Flatten, GlobalAvgPool, MaxPool
from fedmpq.training.binding import Binding, Tensor, single
from fedmpq.training.native_plan import MoveUnit, SumUnit
from fedmpq.training.normalization import Scratch
from fedmpq.training.side_tensors import NotFinite, clip_of


class Sum:
    """An addition of codes, or codes alone, rounded anew."""

    def __init__(self, unit: SumUnit, binding: Binding) -> None:
        self._unit = unit
        # What made the last value is next in the backward pass.
        last = next(reversed(binding.tensors))
        self._next_spares = last in unit.sources and last in binding.sparing
        self._left, *others = (binding.tensors[name] for name in unit.sources)
        self._right = others[0] if others else None
        op, left = unit.quantizer.op, self._left
        self._target = binding.new_tensor(left.images, left.shape, *code_bounds(op.bits, op.signed))
        binding.tensors[unit.output] = target = self._target
        self._states = binding.layout.buffer(left.images * -(-left.elements // 4), np.uint8)
        self._step = c_float()
        self._add = bound.add(
            left.codes,
            (self._right or left).codes,
            left.images,
            left.elements,
            self._step,
            target.low,
            target.high,
            target.pairs,
            binding.threads,
            target.buffer,
            self._states,
        )
        binding.bind(self._add)

    def bind_backward(self, binding: Binding) -> None:
        layout, tensor, sources = binding.layout, self._target, self._unit.sources
        self._clipped = layout.buffer(2, np.float64)
        self._error = binding.errors.pop(self._unit.output)
        self._pass = binding.bind(
            bound.pass_error(
                self._states, tensor.images, tensor.elements, binding.threads, self._error, self._clipped
            )
        )
        layout.use(self._clipped)
        self._twin: Buffer | None = None
        self._adds: list[bound.Call | None] = []
        if len(sources) == 2:
            # Whoever passes an error on may do it in place, unless who is next spares what is another's too.
            self._twin = self._error
            apart = not self._next_spares or sources[0] == sources[1]
            if apart and sources[1] not in binding.errors and sources[1] != INPUT:
                self._twin = layout.buffer(self._error.count, np.uint16)
                layout.use(self._error, self._twin)
            self._adds.append(binding.deliver(sources[1], self._twin))
        self._adds.append(binding.deliver(sources[0], self._error))
        side = binding.side
        self._gradients, self._clip = side.gradients, side.places[clip_of(self._unit.quantizer)].start

    def settle(self, scratch: Scratch) -> None:
        pass

    def forward(self) -> None:
        addition, left, target = self._add, self._left.scale, self._target.scale
        right = 0.0 if self._right is None else self._right.scale
        if self._right is None:
            # Codes alone are a sum with nothing, and the integer program multiplies them by one quotient.
            left, target = single(left / target), 1.0
        if not math.isfinite(single(max(left, right) / target)):
            raise NotFinite(f"the scale of {self._unit.output!r} is not finite")
        addition.left.scale, addition.right.scale, self._step.value = left, right, target
        addition()

    def backward(self) -> None:
        self._pass()
        above, below = self._clipped.array.tolist()
        self._gradients[self._clip] = above - below if self._unit.quantizer.op.signed else above
        if self._twin is not None and self._twin is not self._error:
            np.copyto(self._twin.array, self._error.array)
        for add in self._adds:
            if add is not None:
                add()


class Pool:
    """The greatest or the mean under a window."""

    def __init__(self, unit: MoveUnit, binding: Binding) -> None:
        assert not isinstance(unit.op, Flatten)
        self._unit, self._name = unit, unit.sources[0]
        self._source = source = binding.tensors[self._name]
        self._pool = pool = _pool_of(unit.op, source)
        self._greatest = isinstance(unit.op, MaxPool)
        shape = pool.out_channels, pool.out_height, pool.out_width
        low, high = source.low, source.high
        if not self._greatest:
            averaged = _format(source).averaged()
            low, high = averaged.low, averaged.high
        self._target = target = binding.new_tensor(source.images, shape, low, high)
        binding.tensors[unit.output] = target
        self._multiplier = c_float()
        self._move = binding.bind(
            bound.max_pool(pool, source.codes, binding.threads, target.buffer)
            if self._greatest
            else bound.average_pool(
                pool, source.codes, self._multiplier, low, high, binding.threads, target.buffer
            )
        )

    def bind_backward(self, binding: Binding) -> None:
        error = binding.errors.pop(self._unit.output)
        self._calls: list[bound.Call] = []
        if self._name == INPUT:
            return
        pool, threads = self._pool, binding.threads
        out = binding.layout.buffer(pool.images * pool.inputs, np.uint16)
        self._calls.append(
            binding.bind(
                bound.max_pool_backward(pool, self._source.codes, error, threads, out)
                if self._greatest
                else bound.average_pool_backward(pool, error, threads, out)
            )
        )
        added = binding.deliver(self._name, out)
        self._calls += [] if added is None else [added]

    def settle(self, scratch: Scratch) -> None:
        pass

    def forward(self) -> None:
        if self._greatest:
            self._target.scale = self._source.scale
        else:
            form = _format(self._source)
            self._target.scale = float(form.averaged().scale)
            self._multiplier.value = float(form.averaging(self._pool.kernel_h * self._pool.kernel_w))
        self._move()

    def backward(self) -> None:
        for call in self._calls:
            call()


class Flattening:
    """Channels, then rows, then columns: a new order unless there is one pixel."""

    def __init__(self, unit: MoveUnit, binding: Binding) -> None:
        self._unit, self._name = unit, unit.sources[0]
        self._source = source = binding.tensors[self._name]
        self._in_place = source.shape[1:] == (1, 1)
        shape = source.elements, 1, 1
        if self._in_place:
            self._target = Tensor(source.buffer, source.low, source.high, source.images, shape)
        else:
            self._target = binding.new_tensor(source.images, shape, source.low, source.high)
            binding.layout.use(source.buffer, self._target.buffer)
        binding.tensors[unit.output] = self._target

    def bind_backward(self, binding: Binding) -> None:
        self._error = self._out = binding.errors.pop(self._unit.output)
        if not self._in_place:
            self._out = binding.layout.buffer(self._error.count, np.uint16)
            binding.layout.use(self._error, self._out)
        self._add = binding.deliver(self._name, self._out)

    def settle(self, scratch: Scratch) -> None:
        pass

    def forward(self) -> None:
        self._target.scale = self._source.scale
        if not self._in_place:
            channels, height, width = self._source.shape
            rows = self._source.unpaired().reshape(-1, height, width, channels)
            codes = rows.transpose(0, 3, 1, 2).reshape(self._source.images, -1)
            self._target.buffer.array[...] = _paired(codes, self._target.pairs)

    def backward(self) -> None:
        if not self._in_place:
            channels, height, width = self._source.shape
            turned = self._error.array.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
            np.copyto(self._out.array.reshape(turned.shape), turned)
        if self._add is not None:
            self._add()


def _pool_of(op: MaxPool | AvgPool | GlobalAvgPool, source: Tensor) -> Conv:
    if isinstance(op, GlobalAvgPool):
        kernel = source.shape[1:]
        return Conv.over(source.images, source.shape, kernel, kernel)
    return Conv.over(source.images, source.shape, op.kernel, op.stride, op.padding)


def _format(tensor: Tensor) -> CodeFormat:
    return CodeFormat(np.float32(tensor.scale), tensor.low, tensor.high)


def _paired(codes: NDArray[np.uint8], pairs: bool) -> NDArray[np.uint8]:
    if not pairs:
        return codes.reshape(-1)
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return np.asarray(padded[:, 0::2] | (padded[:, 1::2] << 4), dtype=np.uint8).reshape(-1)
