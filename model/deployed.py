"""A model as a board runs it: the graph, the codes at their bit-widths, and the side tensors for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.model import integer_forward
from fedmpq.model.graph import Graph
from fedmpq.model.integer_program import IntegerProgram, compile_program
from fedmpq.model.metrics import Score, score_of
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import Layers, Side, average_bits
from fedmpq.model.task import Answers, input_values, reconstruction_errors, sigmoid


@dataclass(frozen=True)
class DeployedModel:
    """An integer model with all that inference and export need."""

    graph: Graph
    layers: Layers
    side: Side
    class_names: tuple[str, ...] = ()
    """What each output is called, of a reconstruction the kinds of samples; empty: nothing has a name."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from, such as its run and round, for the card of an exported file."""

    @property
    def bit_widths(self) -> dict[str, int]:
        """The bits of each layer's weights, in the order of the graph."""
        return {node.name: self.layers[node.name].bits for node in self.graph.layers}

    @property
    def bits_per_weight(self) -> float:
        """The mean over all weights: what a budget bounds."""
        return average_bits(tuple(self.bit_widths.values()), self.graph.layer_sizes)

    @cached_property
    def program(self) -> IntegerProgram:
        """The integer operations, with BatchNorm and scales folded into biases and multipliers."""
        return compile_program(self.graph, self.layers, self.side)

    def logits(self, images: NDArray[np.uint8], *, threads: int = 1) -> NDArray[np.float32]:
        """Outputs `(N, outputs)` of uint8 images `(N, H, W, C)`, to the bit what exported files compute:
        logits of classes or labels, or values."""
        products = partial(native_products, threads=threads)
        return integer_forward.logits(self.program, images, products=products)

    def predict(self, images: NDArray[np.uint8], *, threads: int = 1) -> NDArray[Any]:
        """What the model says of each image: a label `(N,)`, which `class_names` has a name for; of several
        labels their probabilities `(N, labels)`; values `(N, outputs)`; or the reconstructed values."""
        outputs = self.logits(images, threads=threads)
        if self.graph.task == "classification":
            labels: NDArray[np.int64] = outputs.argmax(axis=1)
            return labels
        return sigmoid(outputs) if self.graph.task == "multi_label" else outputs

    def anomaly_scores(self, images: NDArray[np.uint8], *, threads: int = 1) -> NDArray[np.float64]:
        """Of a model that reconstructs its input, the mean squared error by image: an anomaly has more."""
        if self.graph.task != "reconstruction":
            raise ValueError(f"a model for {self.graph.task} has no anomaly scores: train a reconstruction")
        values = input_values(self.graph.input.scale, self.graph.input.zero_point, images)
        return reconstruction_errors(self.logits(images, threads=threads), values)

    def score(
        self,
        images: NDArray[np.uint8],
        answers: Answers | None = None,
        *,
        anomalous: NDArray[np.bool_] | None = None,
        threads: int = 1,
    ) -> Score:
        """How well it does by its task's metric, and others beside it. `answers` are labels `(N,)` or targets
        `(N, outputs)`; a reconstruction needs none, and tells anomalies that are marked in `anomalous`."""
        if answers is None:
            if self.graph.task != "reconstruction":
                raise ValueError(f"give the labels or targets of the images: {self.graph.task} has them")
            answers = np.zeros(len(images), np.int64)
        if not len(images) or len(images) != len(answers):
            raise ValueError(f"{len(images)} images and {len(answers)} answers; give one for each of them")
        outputs = self.logits(images, threads=threads)
        return score_of(self.graph, outputs, images, answers, anomalous)

    def accuracy(
        self, images: NDArray[np.uint8], labels: NDArray[np.integer[Any]], *, threads: int = 1
    ) -> float:
        """The share of the images that get their label; `score` is for every task."""
        if self.graph.task != "classification":
            raise ValueError(f"a model for {self.graph.task} has no accuracy: call score")
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels; give one label for each image")
        if len(images) == 0:
            raise ValueError("there are no images to measure an accuracy on; give at least one")
        return float(np.mean(self.predict(images, threads=threads) == labels))
