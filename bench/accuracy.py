"""What the engines' arithmetic costs in accuracy: one model trained on one set of images by each of them.

The same model, images, order and rates for every engine; a seed draws the first weights, the order and the
random numbers of rounding. The last quarter of the epochs has a tenth of the rates. What is measured is the
integer model on test images. `native-float-errors` is the native engine without 8-bit errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import get_args

import numpy as np

from bench.timing import load_average
from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_named
from fedmpq.exchange.messages import TrainingPlan, UpdateRule
from fedmpq.model import integer_forward
from fedmpq.model.first_model import ImageFormat, make_first_model
from fedmpq.model.graph import Graph
from fedmpq.model.grid import StepRule
from fedmpq.model.integer_program import compile_program
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import engine_names, make_engine
from fedmpq.training.local_round import batches

ACTIVATION_BITS = 4
Pair = tuple[Dataset, Dataset]
"""Training and test images."""
STEP_RULES: dict[UpdateRule, StepRule] = {"paper": "max", "carried": "least_error"}


@dataclass(frozen=True)
class Settings:
    """What all runs have in common."""

    model: str
    bits: int
    epochs: int
    batch_size: int
    learning_rate: float
    code_learning_rate: float
    pad: int
    threads: int

    def phases(self, update: UpdateRule) -> tuple[TrainingPlan, TrainingPlan]:
        """Three quarters of the epochs, and the last with a tenth of the rates."""
        last = self.epochs // 4
        first = TrainingPlan(
            epochs=max(1, self.epochs - last),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            code_learning_rate=self.code_learning_rate,
            update=update,
            pad=self.pad,
            flip=True,
        )
        slow = replace(
            first,
            epochs=max(1, last),
            learning_rate=self.learning_rate / 10,
            code_learning_rate=self.code_learning_rate / 10,
        )
        return first, slow


@dataclass(frozen=True)
class Run:
    """One engine's result with one seed; accuracies in per cent."""

    engine: str
    update: UpdateRule
    seed: int
    test_accuracy: float
    train_accuracy: float
    """Of the last epoch, as it went."""
    seconds: float


def train(engine_name: str, update: UpdateRule, seed: int, settings: Settings, data: Pair) -> Run:
    """Train from the seed's first weights, and measure."""
    training, test = data
    image = ImageFormat(*training.image_shape, *training.normalisation())
    graph, weights, side = make_first_model(
        settings.model, seed, len(training.class_names), image, ACTIVATION_BITS
    )
    rule = STEP_RULES[update]
    layers = {
        name: QuantizedLayer.from_weights(weight, settings.bits, rule, False)
        for name, weight in weights.items()
    }
    start, accuracy = time.perf_counter(), 0.0
    for number, plan in enumerate(settings.phases(update)):
        engine, draws = make_engine(engine_name, threads=settings.threads), Draws(seed, 0, number)
        engine.load(graph, layers, side, plan, draws)
        for epoch in range(plan.epochs):
            order = batches(training, plan, draws, epoch, graph.input.zero_point)
            accuracy = engine.train_epoch(order).accuracy
        layers, side = engine.layers(), engine.side()
    right = share_right(graph, layers, side, test)
    return Run(engine_name, update, seed, 100 * right, 100 * accuracy, time.perf_counter() - start)


def share_right(graph: Graph, layers: Layers, side: Side, test: Dataset) -> float:
    """The share of right answers of the integer model."""
    program = compile_program(graph, layers, side)
    guesses = integer_forward.logits(program, test.images, products=native_products).argmax(axis=1)
    return float(np.mean(guesses == test.labels))


def runs(arguments: argparse.Namespace, settings: Settings, data: Pair) -> Iterator[Run]:
    """Engines take turns, so that what there is when a bench is broken off can be compared."""
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for update in arguments.updates:
            for engine in arguments.engines:
                yield train(engine, update, seed, settings, data)


def summary(done: list[Run]) -> list[dict[str, object]]:
    """Mean and spread over the seeds by update rule and engine."""
    found: list[dict[str, object]] = []
    for update, engine in sorted({(run.update, run.engine) for run in done}):
        own = [run.test_accuracy for run in done if (run.update, run.engine) == (update, engine)]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        found.append(
            {
                "update": update,
                "engine": engine,
                "seeds": len(own),
                "mean": round(statistics.mean(own), 2),
                "deviation": round(spread, 2),
            }
        )
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    option = made.add_argument
    option("--data", required=True, help="images, as `fedmpq simulate --data` takes them")
    option("--images", type=int, default=2000, help="training images (default %(default)s)")
    option("--test-images", type=int, default=None, help="test images (all of them by default)")
    option("--size", type=int, default=None, help="resize images to so many pixels a side")
    option("--model", default="resnet20", help="default %(default)s")
    option("--bits", type=int, default=4, help="of every weight (default %(default)s)")
    option("--epochs", type=int, default=12, help="default %(default)s")
    option("--batch-size", type=int, default=64, help="default %(default)s")
    option("--learning-rate", type=float, default=0.1, help="default %(default)s")
    option("--code-learning-rate", type=float, default=0.1, help="of the carried rule (default %(default)s)")
    option("--pad", type=int, default=4, help="pixels by which images are shifted (default %(default)s)")
    option("--seeds", type=int, default=3, help="how many (default %(default)s)")
    option("--first-seed", type=int, default=0, help="default %(default)s")
    option("--threads", type=int, default=1, help="default %(default)s")
    option("--engines", nargs="+", choices=engine_names(), default=list(engine_names()))
    option("--updates", nargs="+", choices=get_args(UpdateRule), default=list(get_args(UpdateRule)))
    option("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    return made


def main() -> None:
    import torch

    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    settings = Settings(
        arguments.model,
        arguments.bits,
        arguments.epochs,
        arguments.batch_size,
        arguments.learning_rate,
        arguments.code_learning_rate,
        arguments.pad,
        arguments.threads,
    )
    data = load_named(
        arguments.data, train_limit=arguments.images, test_limit=arguments.test_images, size=arguments.size
    )
    before, done = load_average(), list[Run]()
    for run in runs(arguments, settings, data):
        done.append(run)
        print(
            f"{run.update:8} {run.engine:20} seed {run.seed}: {run.test_accuracy:5.2f} %"
            f" ({run.train_accuracy:.2f} % in training, {run.seconds:.0f} s)",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
    if arguments.json:
        facts = {"bench": "accuracy", **asdict(settings), "images": arguments.images, "size": arguments.size}
        loads = {"load_average_before": before, "load_average_after": load_average()}
        results = {"summary": summary(done), "runs": [asdict(run) for run in done]}
        print(json.dumps({**facts, **loads, **results}))
        return
    for line in summary(done):
        print(f"{line['update']:8} {line['engine']:20} {line['mean']} ± {line['deviation']} %")


if __name__ == "__main__":
    main()
