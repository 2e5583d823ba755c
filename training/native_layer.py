"""A layer's codes while the native engine trains them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.kernels.tensors import CodeUpdate, Counter, MomentumBuffer
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.randomness import Draws
from fedmpq.training import update


class TrainedLayer:
    """One layer during a round; `index` is its number among the graph's layers."""

    def __init__(self, layer: QuantizedLayer, index: int, plan: TrainingPlan, draws: Draws) -> None:
        self._quantized = replace(layer, codes=np.array(layer.codes, order="C"))
        self.codes = self._quantized.codes.reshape(-1)
        step = layer.step.reshape(-1)
        rate = (
            np.float32(plan.learning_rate) * step
            if plan.update == "paper"
            else np.float32(plan.code_learning_rate) / step
        )
        self.scale = np.array(np.broadcast_to(layer.integer_scale(), (len(layer.codes),)), dtype=np.float32)
        """The scale of the integer weights, one per output channel; steps do not move during a round."""
        self.fractions = np.zeros(self.codes.size, np.int8) if plan.update == "carried" else None
        """256ths of a code beside each; None under the paper's rule."""
        self.momentum = MomentumBuffer.zeros(self.codes.size, plan.momentum_bits if plan.momentum else 0)
        self.update = CodeUpdate.of(
            self.codes.size,
            bits=layer.bits,
            step=step,
            rate=np.asarray(rate, dtype=np.float32),
            weight_decay=plan.weight_decay,
            momentum=plan.momentum,
            buffer=self.momentum,
            fractions=self.fractions,
            counter=Counter(draws.seed, draws.client, draws.round, index, 0),
        )
        """How the kernel updates the codes; `step_number` is to be set before."""
        self._greatest = np.uint8(128 if layer.bits == MAX_BITS else 2**layer.bits - 1)

    def quantized(self) -> QuantizedLayer:
        """The codes as they are now."""
        return replace(self._quantized, codes=self._quantized.codes.copy())

    def integer_weights(self, out: NDArray[np.int8]) -> None:
        """The codes as the kernels multiply them (`grid.integer_weights`), in arithmetic modulo 256."""
        bytes_out, codes = out.view(np.uint8), self.codes
        if self._quantized.bits < MAX_BITS:
            codes = np.add(codes, codes, bytes_out)
        np.subtract(codes, self._greatest, bytes_out)

    def refresh_lasso(self, strength: float) -> None:
        """The Lasso's table from the planes as they are at the start of an epoch."""
        if strength > 0 and self.fractions is None:
            pull = update.lasso_pull(self.codes, self._quantized.bits, strength * self.codes.size)
            self.update.pull_by(pull if pull.any() else None)
