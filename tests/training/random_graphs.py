"""Random graphs through the engines: `python -m tests.training.random_graphs --seconds 60`.

Every graph is valid, and many are odd: kernels as large as their image and larger than it, strides and
padding beyond it, one channel, one class, images of one pixel or one row, wide layers. A seed is printed
before its graph runs, so that the last line names the one at which a process ended;
`python -m tests.training.random_graphs --seed SEED --graphs 1` repeats it.

For each graph the integer forward of the kernels must equal NumPy's, and training steps must give the same
codes on another instruction set with another number of threads. A graph or a training that is refused with
an error of ours is fine; anything else ends the run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from functools import partial

import numpy as np

from fedmpq import kernels
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.dropout import Dropout
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    GraphError,
    Input,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Op,
    Pad,
    Relu,
    Shape,
    Size,
    Slice,
    Upsample,
)
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.native_products import native_products
from fedmpq.model.ops import RULES, check_elements
from fedmpq.model.pointwise import FUNCTIONS
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.quantizers import place_quantizers
from fedmpq.model.randomness import Draws
from fedmpq.model.state_checks import ProgramError
from fedmpq.model.task import Task
from fedmpq.training.engine import Batch, TrainingError
from fedmpq.training.native_engine import NativeEngine
from tests.training.small_graphs import random_batch, random_state

# A graph that a busy core runs within a second or two, sanitizers included.
MOST_PRODUCTS = 4_000_000
MOST_ELEMENTS = 400_000


class RandomNet:
    """A graph that grows by random nodes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        side = partial(self.pick, (1, 2, 3, 5, 8, 13, 17, 33), (1, 90))
        channels = self.pick((1, 2, 3, 4, 5, 16), (1, 40))
        zero = self.pick((0, 128, 255), (0, 255))
        self.image = Input(channels, side(), side(), 0.015625, zero)
        self.nodes: list[Node] = []
        self.shapes: dict[str, Shape] = {INPUT: self.image.shape}
        self.last = INPUT
        self.products = 0

    def pick(self, usual: tuple[int, ...], rare: tuple[int, int]) -> int:
        return self.random.choice(usual) if self.random.random() < 0.85 else self.random.randint(*rare)

    def add(self, op: Op, *inputs: str) -> str:
        """The node, unless the graph would become too large to run in a moment, or invalid."""
        inputs = inputs or (self.last,)
        shape = RULES[type(op)].shape(op, *(self.shapes[name] for name in inputs))
        check_elements("output", shape)
        self._check_cost(op, self.shapes[inputs[0]], shape)
        self.last = f"n{len(self.nodes)}"
        self.nodes.append(Node(self.last, op, inputs, dropout=self._dropout(op)))
        self.shapes[self.last] = shape
        return self.last

    def _dropout(self, op: Op) -> Dropout | None:
        if not isinstance(op, Conv2d | Linear) or self.random.random() < 0.85:
            return None
        return Dropout(
            self.random.choice((0.125, 0.5, 0.9375)), isinstance(op, Conv2d) and self.random.random() < 0.5
        )

    def _check_cost(self, op: Op, source: Shape, shape: Shape) -> None:
        fan_in = 1
        padded = math.prod(source)
        if isinstance(op, Conv2d | Linear):
            fan_in = math.prod(op.weight_shape[1:])
            padded = max(padded, math.prod(op.weight_shape))
        if isinstance(op, Conv2d | MaxPool | AvgPool):
            padded = max(
                padded, source[0] * math.prod(n + 2 * p for n, p in zip(source[1:], op.padding, strict=True))
            )
        if isinstance(op, MaxPool | AvgPool):
            fan_in = math.prod(op.kernel)
        products = math.prod(shape) * fan_in
        if max(padded, math.prod(shape)) > MOST_ELEMENTS or self.products + products > MOST_PRODUCTS:
            raise GraphError("too large to be tried in a moment")
        self.products += products

    def size(self, usual: tuple[int, ...], most: int) -> Size:
        """Both sides, alike or not, sometimes up to `most`."""
        one = self.pick(usual, (usual[0], max(usual[0], most)))
        other = one if self.random.random() < 0.6 else self.pick(usual, (usual[0], max(usual[0], most)))
        return one, other

    def conv(self, channels: int | None = None) -> None:
        inputs, *image = self.shapes[self.last]
        padding = self.size((0, 0, 1, 2), 40)
        room = [n + 2 * p for n, p in zip(image, padding, strict=True)]
        kernel = self.size((1, 2, 3, 3, 5), max(room))
        dilation = self.size((1, 1, 1, 2), max(room))
        stride = self.size((1, 1, 2, 3), 65536)
        outputs = channels or self.pick((1, 2, 8, 16, 17, 32), (1, 300))
        groups = 1
        if self.random.random() < 0.3:
            groups, outputs = inputs, inputs * self.random.choice((1, 1, 1, 2))
        elif self.random.random() < 0.2:
            groups = self.random.choice([n for n in range(1, 9) if inputs % n == outputs % n == 0])
        norm = self.random.random() < 0.7
        self.add(Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, not norm))
        if norm:
            self.add(BatchNorm(outputs, 1e-5, 0.125))
        self.relu()

    def relu(self) -> None:
        """Or a function by table, or both, or nothing."""
        if self.random.random() < 0.3:
            function = self.random.choice(list(FUNCTIONS))
            has_parameter = FUNCTIONS[function].parameter is not None
            self.add(Lookup(function, self.random.choice((0.0, 0.25, 2.0)) if has_parameter else 0.0))
            if self.random.random() < 0.8:
                return
        if (chance := self.random.random()) < 0.7:
            self.add(Relu(6.0 if chance < 0.2 else 0.0))

    def pool(self) -> None:
        _, *image = self.shapes[self.last]
        if self.random.random() < 0.2:
            self.add(AdaptiveAvgPool(self.size((1, 2, 3), max(image) + 3)))
            return
        kernel = self.size((1, 2, 3), max(image))
        padding = self.random.randint(0, kernel[0] // 2), self.random.randint(0, kernel[1] // 2)
        window = kernel, self.size((1, 2, 3), 65536), padding
        ceil_mode, exclude = self.random.random() < 0.3, self.random.random() < 0.3
        chosen = self.random.random() < 0.5
        self.add(MaxPool(*window, ceil_mode) if chosen else AvgPool(*window, ceil_mode, exclude))

    def joined(self) -> None:
        """What is there, what a convolution makes of it, maybe more than once, and maybe normalized."""
        source = self.last
        parts = [source] * self.random.randint(1, 2)
        for _ in range(self.random.randint(1, 2)):
            channels = self.random.choice((1, 3, 8))
            inputs = self.shapes[source][0]
            self.add(Conv2d(inputs, channels, (1, 1), (1, 1), (0, 0), (1, 1), 1, bias=True), source)
            self.relu()
            parts.append(self.last)
        self.random.shuffle(parts)
        self.add(Concat(), *parts)
        if self.random.random() < 0.6:
            self.norm()

    def norm(self) -> None:
        """A BatchNorm of codes; of what a layer gives it would be folded into the layer."""
        self.add(BatchNorm(self.shapes[self.last][0], 1e-5, 0.125))
        self.relu()

    def moved(self) -> None:
        channels = self.shapes[self.last][0]
        start = self.random.randrange(channels)
        few = partial(self.random.randint, 0, 3)
        divisors = [groups for groups in range(1, channels + 1) if channels % groups == 0]
        rearrangements: tuple[Op, ...] = (
            Slice(start, self.random.randint(start + 1, channels)),
            ChannelShuffle(self.random.choice(divisors)),
            Pad((few(), few()), (few(), few())),
            Upsample((few() + 1, few() + 1)),
        )
        self.add(self.random.choice(rearrangements))

    def residual(self) -> None:
        source = self.last
        self.conv(self.shapes[source][0])
        self.add(Add(), self.last, source)
        self.relu()

    def gate(self) -> None:
        """A value times one that is made of its mean, or of itself."""
        source = self.last
        if self.random.random() < 0.7:
            channels = self.shapes[self.add(GlobalAvgPool())][0]
            self.add(Conv2d(channels, channels, (1, 1), (1, 1), (0, 0), (1, 1), 1, True))
        self.add(Lookup(self.random.choice(("sigmoid", "hardsigmoid", "tanh")), 0.0))
        self.add(Mul(), source, self.last)
        self.relu()

    def head(self) -> None:
        if self.random.random() < 0.4:
            self.add(GlobalAvgPool())
        self.add(Flatten())
        if self.random.random() < 0.3:
            self.add(Linear(self.shapes[self.last][0], self.pick((1, 7, 16), (1, 2000)), True))
            self.relu()
        self.add(
            Linear(self.shapes[self.last][0], self.pick((1, 2, 3, 10), (1, 1000)), self.random.random() < 0.5)
        )

    def graph(self) -> Graph:
        bits = self.pick((4, 4, 8), (1, 8))
        task: Task = self.random.choice(("classification", "classification", "multi_label", "regression"))
        return place_quantizers(Graph("random", self.image, tuple(self.nodes), self.last, task), bits)


def random_graph(seed: int) -> Graph:
    """A valid graph; nodes that do not fit where they would come are left out."""
    for attempt in itertools.count():
        net = RandomNet(seed * 1000 + attempt)
        for number in range(net.random.randint(1, 6)):
            before = len(net.nodes), net.last
            # An average of the image itself is refused.
            kinds = (net.conv, net.conv, net.pool, net.residual, net.joined, net.moved, net.norm, net.gate)
            grow = net.random.choice(kinds) if number else net.conv
            try:
                grow()
            except GraphError:
                del net.nodes[before[0] :]
                net.last = before[1]
        try:
            net.head()
            return net.graph()
        except GraphError:
            continue
    raise AssertionError


def forward(graph: Graph, layers: Layers, side: Side, images: Batch, threads: int) -> None:
    """The kernels' logits are NumPy's, of several images, of one and of none."""
    program = compile_program(graph, layers, side)
    native = partial(native_products, threads=threads)
    for count in (len(images[0]), 1, 0):
        rows = images[0][:count]
        np.testing.assert_array_equal(logits(program, rows, products=native), logits(program, rows))


def trained(
    graph: Graph, layers: Layers, side: Side, plan: TrainingPlan, images: Batch, threads: int
) -> object:
    """The codes after two steps of different batch sizes, or why there are none."""
    engine = NativeEngine(threads)
    try:
        engine.load(graph, layers, side, plan, Draws(7, 1, 2))
        engine.train_epoch([images, (images[0][:2], images[1][:2])])
    except (TrainingError, GraphError) as error:
        return str(error)
    return {name: layer.codes.tolist() for name, layer in engine.layers().items()}


def run(seed: int) -> str:
    """One graph through everything; what became of it."""
    graph = random_graph(seed)
    assert Graph.from_bytes(graph.to_bytes()) == graph
    choice = random.Random(seed)
    bits = tuple(choice.randint(1, 8) for _ in range(3))
    layers, side = random_state(graph, bits=bits, per_channel=choice.random() < 0.5, seed=seed)
    images = random_batch(graph, choice.randint(2, 6), seed)
    isas = kernels.supported_isas()
    plan = TrainingPlan(
        momentum_bits=choice.choice((0, 8, 32)), update=choice.choice(("paper", "carried")), lasso=0.5
    )
    outcomes = []
    for isa, threads in ((isas[0], choice.randint(1, 4)), (choice.choice(isas), choice.randint(1, 80))):
        kernels.force_isa(isa)
        try:
            forward(graph, layers, side, images, threads)
        except ProgramError as error:
            return f"refused: {error}"
        outcomes.append(trained(graph, layers, side, plan, images, threads))
    assert outcomes[0] == outcomes[1], "the codes depend on the instruction set or the threads"
    return f"refused: {outcomes[0]}" if isinstance(outcomes[0], str) else "trained"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--graphs", type=int, default=0, help="end after so many; 0: do not count")
    parser.add_argument("--seed", type=int, default=0, help="the first graph's")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    for seed in itertools.count(given.seed):
        if time.monotonic() > end or (given.graphs and seed - given.seed >= given.graphs):
            break
        print(f"seed {seed}: ", end="", flush=True)
        print(run(seed), flush=True)


if __name__ == "__main__":
    main()
