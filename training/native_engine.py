"""The `native` engine: integer training in C++, no torch.

Forward, an image batch of codes runs through the units of the graph (native_plan); what is kept is codes,
4-bit ones packed in pairs. Backward, accumulators are computed again but for those of late layers that there
was room for; errors are bfloat16 between units and int8 with stochastic rounding inside products, so that all
three products of a layer are integer ones. A layer's codes are updated as soon as its gradient is known, side
tensors at the end of a step.

Every batch size has its step (native_step), a list of calls whose memory and arguments are made ready once,
and which the library walks by itself (kernels/program).

The same seed gives the same codes to the bit on every instruction set, machine and number of threads: sums
are integers or have a fixed order, and what is done in NumPy here are single IEEE operations on a number per
channel.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import Fractions
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.program import Program
from fedmpq.kernels.tensors import MAX_THREADS
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.state_checks import check_state
from fedmpq.model.task import Answers, answer_problem, answers_of
from fedmpq.system.machine import available_cores
from fedmpq.training.arena import Arena
from fedmpq.training.client_draws import ClientDraws
from fedmpq.training.engine import Batch, EngineError, EpochResult, Shift, TrainingError
from fedmpq.training.losses import answers_each
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import units_of
from fedmpq.training.native_step import BoundStep, NativeStep
from fedmpq.training.side_tensors import NotFinite, SideTensors

# An epoch has two batch sizes, the last batch's and that of all others. Who trains many clients meets many.
_STEPS_KEPT = 2
_STEPS_KEPT_AMPLY = 16


class NativeEngine:
    """Trains with the C++ kernels; see `Engine`. `threads` share the images of a batch.

    `float_errors` leaves errors as they are instead of rounding them to 8 bits, to measure what that costs.
    It is slow, and its codes are not the same to the bit on every machine (module `float_errors`).

    With `ample` memory all accumulators that are worth it are kept for the backward pass, and steps of more
    batch sizes: faster, with the same codes.
    """

    def __init__(self, threads: int | None = None, float_errors: bool = False, ample: bool = False) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads = {threads}: the native engine needs at least one")
        self.threads = min(threads or available_cores(), MAX_THREADS)
        self._float_errors, self._ample = float_errors, ample
        self._arena = Arena()
        self._draws = ClientDraws()
        self._bound_to: Graph | None = None
        self._layers: dict[str, TrainedLayer] = {}
        self._steps: dict[int, NativeStep] = {}

    def load(
        self,
        graph: Graph,
        layers: Layers,
        side: Side,
        plan: TrainingPlan,
        draws: Draws,
        shift: Shift | None = None,
    ) -> None:
        check_state(graph, layers, side)
        if self._takes(graph, layers, plan):
            # What was bound for the client before serves this one: half of a short round is binding.
            for name, layer in self._layers.items():
                layer.load(layers[name], plan, draws)
            self._side.load(side, plan)
        else:
            self._start(graph, layers, side, plan, draws)
        self._graph, self._plan = graph, plan
        self._shift[...] = 0.0 if shift is None else shift
        self._draws.turn_to(draws)
        self._step_number = 0

    def _start(self, graph: Graph, layers: Layers, side: Side, plan: TrainingPlan, draws: Draws) -> None:
        self._bound_to = None
        self._steps.clear()
        self._units = units_of(graph)
        self._layers = {
            node.name: TrainedLayer(layers[node.name], index, plan, draws)
            for index, node in enumerate(graph.layers)
        }
        self._side = SideTensors(side, self._units, plan, graph.frozen_side)
        self._shift = np.zeros(graph.shapes[graph.output][0], np.float32)
        self._bound_to = graph

    def _takes(self, graph: Graph, layers: Layers, plan: TrainingPlan) -> bool:
        """Whether it is the graph of before, with layers and a plan that need the same memory."""
        return self._bound_to == graph and all(
            layer.takes(layers[name], plan) for name, layer in self._layers.items()
        )

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        strength = self._plan.learning_rate * self._plan.lasso / sum(self._graph.layer_sizes)
        for layer in self._layers.values():
            layer.refresh_lasso(strength)
        samples, loss_sum, right_sum = 0, 0.0, 0
        for images, given in batches:
            self._check_images(images)
            answers = answers_of(self._graph, images, given)
            if problem := answer_problem(self._graph, len(images), answers):
                raise TrainingError(problem)
            loss, right = self._train_step(images, answers)
            samples += len(images)
            loss_sum += loss * len(images)
            right_sum += right
        answered = samples * answers_each(self._graph)
        return EpochResult(samples, loss_sum / max(1, samples), right_sum / max(1, answered))

    def layers(self) -> Layers:
        return {name: layer.quantized() for name, layer in self._layers.items()}

    def fractions(self) -> dict[str, Fractions]:
        held = {name: layer.fractions for name, layer in self._layers.items()}
        return {name: fractions.copy() for name, fractions in held.items() if fractions is not None}

    def side(self) -> Side:
        return self._side.tensors()

    def rest(self) -> None:
        self._arena.rest()

    def programs(self) -> list[Program]:
        """What its steps have the library run in one go, for measurements."""
        return [program for step in self._steps.values() for program in step.programs]

    def _check_images(self, images: NDArray[np.uint8]) -> None:
        """Refuse a batch of other types or shapes than the model's, in the model's words."""
        channels, height, width = self._graph.input.shape
        if images.dtype != np.uint8 or images.shape[1:] != (height, width, channels) or not len(images):
            raise TrainingError(
                f"a batch of images is {images.dtype} of shape {images.shape}, the model takes uint8 of"
                f" (images, {height}, {width}, {channels}) and at least one image"
            )

    def _train_step(self, images: NDArray[np.uint8], answers: Answers) -> tuple[float, int]:
        step = self._steps.get(len(images)) or self._new_step(len(images))
        try:
            # What overflows float32 is found and named where it happens.
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                result = step.run(self._step_number, images, answers)
        except (NotFinite, FloatingPointError) as error:
            rate = self._plan.learning_rate
            raise TrainingError(
                f"{error} in training step {self._step_number}; lower the learning rate (now {rate})"
            ) from None
        except KernelError as error:
            raise TrainingError(f"the native engine cannot train {self._graph.name!r}: {error}") from None
        self._step_number += 1
        return result

    def _new_step(self, images: int) -> NativeStep:
        bound = BoundStep(
            self._graph,
            self._units,
            images,
            self._layers,
            self._side,
            self._shift,
            self._draws,
            self.threads,
            self._float_errors,
        )
        needed = bound.layout.place(all_spare=self._ample)
        if needed > self._arena.block.nbytes:
            self._steps.clear()
            self._arena.grow(needed)
        elif len(self._steps) >= (_STEPS_KEPT_AMPLY if self._ample else _STEPS_KEPT):
            del self._steps[next(iter(self._steps))]
        step = bound.put_into(self._arena.block)
        self._steps[images] = step
        return step
