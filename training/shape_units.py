"""What joins codes or moves them about in training; nothing is learnt."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass

import numpy as np

from fedmpq.kernels import bound_shapes
from fedmpq.kernels.call import Call
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.model.activations import CodeFormat
from fedmpq.model.rearrangements import places, rearranged_shape
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.native_plan import ConcatUnit, RearrangeUnit


@dataclass(frozen=True)
class _Part:
    """One source of a concatenation: its channels begin at `start` of the whole."""

    source: Tensor
    start: int
    multiplier: c_float
    join: Call


@dataclass(frozen=True)
class ConcatForward:
    """A concatenation whose forward calls are bound."""

    unit: ConcatUnit
    target: Tensor
    parts: tuple[_Part, ...]

    @classmethod
    def bind(cls, unit: ConcatUnit, binding: Binding) -> ConcatForward:
        sources = [binding.tensors[name] for name in unit.sources]
        form = CodeFormat.joined([_format(source) for source in sources])
        first, channels = sources[0], sum(source.shape[0] for source in sources)
        target = binding.new_tensor(first.images, (channels, *first.shape[1:]), form.low, form.high)
        parts, start = [], 0
        for source in sources:
            multiplier = c_float()
            join = bound_shapes.join(
                source.codes,
                _extent(source),
                multiplier,
                form.low,
                form.high,
                start,
                channels,
                binding.threads,
                target.buffer,
            )
            parts.append(_Part(source, start, multiplier, binding.bind(join)))
            start += source.shape[0]
        binding.tensors[unit.output] = target
        return cls(unit, target, tuple(parts))

    def bind_backward(self, binding: Binding) -> Concatenation:
        error, threads = binding.errors.pop(self.unit.output), binding.threads
        calls = []
        for name, part in zip(self.unit.sources, self.parts, strict=True):
            if name in binding.unlearnt:
                continue
            out = binding.layout.buffer(part.source.images * part.source.elements, np.uint16)
            channels = self.target.shape[0]
            calls.append(
                binding.bind(
                    bound_shapes.part_errors(error, _extent(part.source), part.start, channels, threads, out)
                )
            )
            if (added := binding.deliver(name, out)) is not None:
                calls.append(added)
        return Concatenation(self, tuple(calls))

    def forward_only(self) -> Concatenation:
        return Concatenation(self, ())


class Concatenation(StepUnit):
    """The channels of several values, in one format."""

    def __init__(self, forward: ConcatForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = tuple(part.join for part in forward.parts), backward

    def settle(self, scratch: Scratch) -> Concatenation:
        return self

    def prepare(self) -> None:
        parts = self.bound.parts
        formats = [_format(part.source) for part in parts]
        joined = CodeFormat.joined(formats)
        self.bound.target.scale = float(joined.scale)
        for part, form in zip(parts, formats, strict=True):
            part.multiplier.value = float(form.joining(joined))


@dataclass(frozen=True)
class RearrangeForward:
    """A rearrangement whose forward call is bound."""

    unit: RearrangeUnit
    source: Tensor
    target: Tensor
    run: Call

    @classmethod
    def bind(cls, unit: RearrangeUnit, binding: Binding) -> RearrangeForward:
        source = binding.tensors[unit.source]
        channels, height, width = rearranged_shape(unit.op, source.shape)
        target = binding.new_tensor(
            source.images, (channels, height, width), source.low, source.high, source.number
        )
        table = places(unit.op, source.shape)
        run = bound_shapes.rearrange(
            source.codes, source.images, source.elements, table, binding.threads, target.buffer
        )
        binding.tensors[unit.output] = target
        return cls(unit, source, target, binding.bind(run))

    def bind_backward(self, binding: Binding) -> Rearranging:
        error, source = binding.errors.pop(self.unit.output), self.source
        if self.unit.source in binding.unlearnt:
            return Rearranging(self, ())
        out = binding.layout.buffer(source.images * source.elements, np.uint16)
        table = places(self.unit.op, source.shape)
        spread = binding.bind(
            bound_shapes.rearrange_backward(
                error, source.images, source.elements, table, binding.threads, out
            )
        )
        added = binding.deliver(self.unit.source, out)
        return Rearranging(self, (spread,) if added is None else (spread, added))

    def forward_only(self) -> Rearranging:
        return Rearranging(self, ())


class Rearranging(StepUnit):
    """Codes in other places, of the same scale."""

    def __init__(self, forward: RearrangeForward, backward: tuple[Call, ...]) -> None:
        self.bound = forward
        self.forward, self.backward = (forward.run,), backward

    def settle(self, scratch: Scratch) -> Rearranging:
        return self


def _extent(tensor: Tensor) -> FedmpqExtent:
    channels, height, width = tensor.shape
    return FedmpqExtent(tensor.images, height * width, channels)


def _format(tensor: Tensor) -> CodeFormat:
    return CodeFormat(np.float32(tensor.scale), tensor.low, tensor.high)
