"""A layer's codes while the native engine trains them."""

from __future__ import annotations

from ctypes import c_uint32

import numpy as np

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels.tensors import CodeUpdate, Counter, MomentumBuffer, WeightCodes
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.randomness import Draws
from fedmpq.training import update


class TrainedLayer:
    """One layer during a round; `index` is its number among the graph's layers.

    Calls are bound to its memory, which stays where it is when the next client's codes are loaded.
    """

    def __init__(self, layer: QuantizedLayer, index: int, plan: TrainingPlan, draws: Draws) -> None:
        size, steps = layer.codes.size, layer.step.size
        self._index, self._momentum_bits = index, _momentum_bits(plan)
        self.codes = np.empty(size, np.uint8)
        self.bits = c_uint32()
        self.weights = WeightCodes(self.codes, self.bits)
        """As products read them."""
        self.scale = np.empty(len(layer.codes), np.float32)
        """The scale of the integer weights, one per output channel; steps do not move during a round."""
        self.fractions = np.empty(size, np.int8) if plan.update == "carried" else None
        """256ths of a code beside each; None under the paper's rule."""
        self._momentum = MomentumBuffer.zeros(size, self._momentum_bits)
        self._step, self._rate = np.empty(steps, np.float32), np.empty(steps, np.float32)
        self.update = CodeUpdate.of(
            size,
            bits=layer.bits,
            step=self._step,
            rate=self._rate,
            weight_decay=plan.weight_decay,
            momentum=plan.momentum,
            buffer=self._momentum,
            fractions=self.fractions,
            counter=Counter(draws.seed, draws.client, draws.round, index, 0),
        )
        """How the kernel updates the codes; `step_number` is to be set before."""
        self.load(layer, plan, draws)

    def takes(self, layer: QuantizedLayer, plan: TrainingPlan) -> bool:
        """Whether such a layer can be loaded, trained by such a plan."""
        return (
            layer.codes.shape == self._shape
            and layer.step.size == self._step.size
            and (plan.update == "carried") == (self.fractions is not None)
            and _momentum_bits(plan) == self._momentum_bits
        )

    def load(self, layer: QuantizedLayer, plan: TrainingPlan, draws: Draws) -> None:
        """Take a client's codes; momentum and fractions start at zero."""
        self._shape, self._given_step = layer.codes.shape, layer.step
        self.codes[...] = layer.codes.reshape(-1)
        self.bits.value = layer.bits
        self.scale[...] = layer.integer_scale()
        self._step[...] = layer.step.reshape(-1)
        if plan.update == "paper":
            np.multiply(np.float32(plan.learning_rate), self._step, self._rate)
        else:
            np.divide(np.float32(plan.code_learning_rate), self._step, self._rate)
        if self.fractions is not None:
            self.fractions[...] = 0
        self._momentum.clear()
        self.update.bits, self.update.seed, self.update.client = layer.bits, draws.seed, draws.client
        self.update.round = draws.round
        self.update.weight_decay, self.update.momentum = plan.weight_decay, plan.momentum
        self.update.pull_by(None)

    def quantized(self) -> QuantizedLayer:
        """The codes as they are now."""
        return QuantizedLayer(self.codes.reshape(self._shape).copy(), self.bits.value, self._given_step)

    def refresh_lasso(self, strength: float) -> None:
        """The Lasso's table from the planes as they are at the start of an epoch."""
        if strength > 0 and self.fractions is None:
            pull = update.lasso_pull(self.codes, self.bits.value, strength * self.codes.size)
            self.update.pull_by(pull if pull.any() else None)


def _momentum_bits(plan: TrainingPlan) -> int:
    return plan.momentum_bits if plan.momentum else 0
