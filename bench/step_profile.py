"""Where the time of a training step goes: `python -m bench.train_step --profile`.

Every kernel is timed by the clock of this thread alone, which other work on the machine disturbs least: those
that the library runs in one go by the library, the others here. What is left of a step is Python.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.workload import Workload, engine_trainer
from fedmpq.exchange.messages import UpdateRule
from fedmpq.kernels.call import Call
from fedmpq.kernels.library import library
from fedmpq.kernels.prototypes import PROTOTYPES, FedmpqConv
from fedmpq.training.native_engine import NativeEngine

WARM_UP = 2
LEAST_SHARE = 0.01
"""Of the step's time: what takes less is not shown."""


@dataclass
class Profile:
    """Seconds of `steps` steps: by kernel, and those of products also by the layers of one shape."""

    steps: int
    seconds: float = 0.0
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    layers: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, seconds: float, conv: FedmpqConv | None) -> None:
        kernel = name.removeprefix("fedmpq_")
        self.kernels[kernel] += seconds
        if conv is not None:
            self.layers[f"{shape_of(conv)}, {kernel.removeprefix('conv_')}"] += seconds

    def lines(self) -> Iterator[str]:
        rest = {"around the kernels": self.seconds - sum(self.kernels.values())}
        for title, shares in (("kernel", {**self.kernels, **rest}), ("products of layers", self.layers)):
            yield f"{title:58}{'ms/step':>9}{'%':>7}"
            for name, seconds in sorted(shares.items(), key=lambda share: -share[1]):
                if seconds >= LEAST_SHARE * self.seconds:
                    milliseconds, share = seconds / self.steps * 1e3, 100 * seconds / self.seconds
                    yield f"{name:58}{milliseconds:9.3f}{share:7.1f}"


def shape_of(conv: FedmpqConv) -> str:
    """A layer in a few words; layers of one shape are told apart by nothing."""
    kernel = f"{conv.kernel_h}x{conv.kernel_w}/{conv.stride_h}"
    if conv.groups == conv.channels == conv.out_channels > 1:
        return f"{conv.height}x{conv.width}, {conv.channels} channels depthwise by {kernel}"
    groups = f" in {conv.groups} groups" if conv.groups > 1 else ""
    return f"{conv.height}x{conv.width}, {conv.channels} to {conv.out_channels} channels by {kernel}{groups}"


def profile(work: Workload, update: UpdateRule, threads: int, steps: int) -> Profile:
    """Of steps of an engine of its own, on one thread's clock: with more threads kernels wait for others."""
    found, engine = Profile(steps), NativeEngine(threads)
    with _timed_library(found):
        train = engine_trainer(engine, work, update)
        train(WARM_UP)
        found.kernels.clear()
        found.layers.clear()
        taken = [(program, program.timed()) for program in engine.programs()]
        start = time.thread_time()
        train(steps)
        found.seconds = time.thread_time() - start
    for program, seconds in taken:
        for call, each in zip(program.calls, seconds.tolist(), strict=True):
            found.add(call.name, each, conv_of(call))
    return found


def conv_of(call: Call) -> FedmpqConv | None:
    """The layer that a call is of, if it is a product."""
    of_layer = PROTOTYPES[call.name].arguments[0].type is FedmpqConv
    return FedmpqConv.from_address(call.values[0].value) if of_layer else None


@contextmanager
def _timed_library(found: Profile) -> Iterator[None]:
    """The library with a clock around each of its functions; calls bound meanwhile keep it."""
    around = ("fedmpq_isa", "fedmpq_force_isa", "fedmpq_function", "fedmpq_run")
    names = [name for name in PROTOTYPES if name not in around]
    before = {name: getattr(library, name) for name in names}
    for name, function in before.items():
        setattr(library, name, _timed(name, function, found))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(library, name, function)


def _timed(name: str, function: Any, found: Profile) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        start = time.thread_time()
        result = function(*arguments)
        found.add(name, time.thread_time() - start, None)
        return result

    return call
