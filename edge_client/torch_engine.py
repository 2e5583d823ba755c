"""The `torch` engine: the readable reference of local training.

Codes are the only weights kept between steps. A layer's weights exist as floats while that layer computes, and its
codes are updated the moment its gradient is known, so no gradient of the whole model exists either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpq.edge_client import torch_ops, update
from fedmpq.edge_client.engine import Batch, EpochResult, TrainingError
from fedmpq.edge_client.momentum import make_momentum
from fedmpq.edge_client.torch_ops import Backward, LayerWeight, Value
from fedmpq.model.activations import MIN_CLIP, CodeFormat
from fedmpq.model.exchange import TrainingPlan
from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    MaxPool,
    Node,
    Quantize,
    Relu,
)
from fedmpq.model.integer_program import check_state
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights
from fedmpq.model.randomness import Draws, Purpose

WeightSource = Callable[[str], LayerWeight]


class _TrainedLayer:
    """One layer's codes, momentum and Lasso table during a round."""

    def __init__(self, index: int, layer: QuantizedLayer, share: float, plan: TrainingPlan, draws: Draws) -> None:
        self.index = index
        self.shape = layer.codes.shape
        self.codes = layer.codes.reshape(-1).copy()
        self.bits = layer.bits
        self.step = layer.step
        self._plan = plan
        self._draws = draws
        self._lasso_strength = plan.learning_rate * plan.lasso * share
        self._momentum = make_momentum(self.codes.size, plan.momentum, plan.momentum_bits)
        per_weight = np.repeat(self.step, self.codes.size // max(1, self.step.size)) if self.step.ndim else self.step
        self._paper_rate = np.asarray(np.float32(plan.learning_rate) * per_weight, dtype=np.float32)
        self._rounded_rate = np.asarray(np.float32(plan.code_learning_rate) / per_weight, dtype=np.float32)
        self._pull = np.zeros(0, np.float32)

    def quantized(self) -> QuantizedLayer:
        return QuantizedLayer(self.codes.reshape(self.shape), self.bits, self.step)

    def weight(self) -> LayerWeight:
        layer = self.quantized()
        tensor = torch.from_numpy(layer.integer_weights()).float()
        bound = 127 if self.bits == 8 else 2**self.bits - 1
        return LayerWeight(tensor, torch.from_numpy(np.asarray(layer.integer_scale())), bound)

    def refresh_lasso(self) -> None:
        """The Lasso's table from the planes as they are at the start of an epoch."""
        if self._lasso_strength > 0:
            self._pull = update.lasso_pull(self.codes, self.bits, self._lasso_strength)

    def apply(self, gradient: NDArray[np.float32], step: int) -> None:
        """Weight decay, momentum, the stochastic move and the Lasso's."""
        decayed = gradient + np.float32(self._plan.weight_decay) * self.quantized().weights().reshape(-1)
        direction = self._momentum.push(decayed)
        uniforms = self._uniform(Purpose.UPDATE, step)
        if self._plan.update == "paper":
            self.codes = update.paper_update(self.codes, direction, self._paper_rate, self.bits, uniforms)
            if self._pull.any():
                uniforms = self._uniform(Purpose.LASSO, step)
                self.codes = update.lasso_update(self.codes, self._pull, self.bits, uniforms)
            return
        move = direction * self._rounded_rate
        if self._pull.any():
            move = move + update.lasso_move(self.codes, self._pull, self.bits)
        self.codes = update.rounded_update(self.codes, move, self.bits, uniforms)

    def _uniform(self, purpose: Purpose, step: int) -> NDArray[np.float32]:
        return self._draws.uniform(self.codes.size, purpose, layer=self.index, step=step)


class _Network:
    """A graph walked forwards, keeping what the way back needs."""

    def __init__(self, graph: Graph, side: Mapping[str, Tensor], weights: WeightSource, training: bool) -> None:
        self.graph = graph
        self.side = side
        self.weights = weights
        self.training = training
        self.tape: list[tuple[Node, Backward]] = []
        self.on_weight: Callable[[str, Tensor], None] = lambda _name, _gradient: None
        self.on_side: Callable[[str, Tensor], None] = lambda _name, _gradient: None
        self._last_use = {name: node.name for node in graph.nodes for name in node.inputs}

    def forward(self, images: NDArray[np.uint8]) -> Tensor:
        centred = images.astype(np.float32) - np.float32(self.graph.input.zero_point)
        form = CodeFormat.image(self.graph.input.scale, self.graph.input.zero_point)
        values = {INPUT: Value(torch.from_numpy(centred).permute(0, 3, 1, 2), form)}
        for node in self.graph.nodes:
            value, backward = self._apply(node, [values[name] for name in node.inputs])
            values[node.name] = value
            if self.training:
                self.tape.append((node, backward))
            for name in set(node.inputs):
                if self._last_use[name] == node.name:
                    del values[name]
        return values[self.graph.output].tensor

    def backward(self, gradient: Tensor) -> None:
        """Hand every parameter's gradient to `on_weight` or `on_side`, last layer first."""
        gradients = {self.graph.output: gradient}
        while self.tape:
            node, backward = self.tape.pop()
            received = gradients.pop(node.name, None)
            if received is None:
                continue
            for name, passed in zip(node.inputs, backward(received), strict=True):
                if passed is not None and name != INPUT:
                    gradients[name] = passed if name not in gradients else gradients[name] + passed

    def _apply(self, node: Node, inputs: list[Value]) -> tuple[Value, Backward]:
        op, value = node.op, inputs[0]
        if isinstance(op, Conv2d | Linear):
            return self._product(node, op, value)
        if isinstance(op, BatchNorm):
            return self._batch_norm(node, op, value)
        if isinstance(op, Relu):
            return Value(value.tensor, value.form, op.maximum), lambda gradient: (gradient,)
        if isinstance(op, Quantize):
            return self._quantize(node, op, value)
        if isinstance(op, Add):
            return torch_ops.add(inputs[0], inputs[1])
        if isinstance(op, MaxPool):
            return torch_ops.max_pool(value, op)
        if isinstance(op, AvgPool):
            return torch_ops.average_pool(value, op)
        if isinstance(op, GlobalAvgPool):
            return torch_ops.average_pool(value, None)
        assert isinstance(op, Flatten)
        return torch_ops.flatten(value)

    def _product(self, node: Node, op: Conv2d | Linear, value: Value) -> tuple[Value, Backward]:
        bias = self.side[f"{node.name}.bias"] if op.bias else None
        out = torch_ops.forward_product(value, self.weights(node.name), bias, op)
        if not self.training:
            return out, lambda gradient: (None,)
        packed, (_, form), first = value.packed(), value.codes(), node.inputs[0] == INPUT

        def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
            source, weight = torch_ops.backward_product(
                packed, float(form.scale), self.weights(node.name), op, gradient, first
            )
            self.on_weight(node.name, weight)
            if op.bias:
                self.on_side(f"{node.name}.bias", gradient.sum(dim=[0, *range(2, gradient.ndim)]))
            return (source,)

        return out, backward

    def _batch_norm(self, node: Node, op: BatchNorm, value: Value) -> tuple[Value, Backward]:
        names = [f"{node.name}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        gamma, beta, mean, variance = (self.side[name] for name in names)
        out, back = torch_ops.batch_norm(value, gamma, beta, mean, variance, op, self.training)

        def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
            source, d_gamma, d_beta = back(gradient)
            self.on_side(names[0], d_gamma)
            self.on_side(names[1], d_beta)
            return (source,)

        return out, backward

    def _quantize(self, node: Node, op: Quantize, value: Value) -> tuple[Value, Backward]:
        name = f"{node.name}.clip"
        clip, maximum = np.float32(self.side[name]), value.maximum or 0.0
        form = CodeFormat.quantized(clip, maximum, op.bits, op.signed)
        out, back = torch_ops.quantize(value, form, clip_is_free=not 0 < maximum <= clip)

        def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
            source, d_clip = back(gradient)
            self.on_side(name, d_clip)
            return (source,)

        return out, backward


class TorchEngine:
    """Trains with torch on the CPU; see `Engine`."""

    def load(self, graph: Graph, layers: Layers, side: Side, plan: TrainingPlan, draws: Draws) -> None:
        check_state(graph, layers, side)
        self._graph = graph
        self._plan = plan
        total = sum(graph.layer_sizes)
        self._layers = {
            node.name: _TrainedLayer(index, layers[node.name], layers[node.name].codes.size / total, plan, draws)
            for index, node in enumerate(graph.layers)
        }
        self._side = {name: torch.from_numpy(tensor.copy()) for name, tensor in side.items()}
        self._side_momentum: dict[str, Tensor] = {}
        self._step = 0

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        for layer in self._layers.values():
            layer.refresh_lasso()
        samples, loss_sum, right_sum = 0, 0.0, 0
        with torch.no_grad():
            for images, labels in batches:
                loss, right = self._train_step(images, labels)
                samples, loss_sum, right_sum = samples + len(labels), loss_sum + loss * len(labels), right_sum + right
        return EpochResult(samples, loss_sum / max(1, samples), right_sum / max(1, samples))

    def layers(self) -> Layers:
        return {name: layer.quantized() for name, layer in self._layers.items()}

    def side(self) -> Side:
        return {name: tensor.numpy().copy() for name, tensor in self._side.items()}

    def _train_step(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[float, int]:
        network = _Network(self._graph, self._side, lambda name: self._layers[name].weight(), training=True)
        network.on_weight, network.on_side = self._update_weight, self._update_side
        logits = network.forward(images)
        loss, right, gradient = torch_ops.cross_entropy(logits, torch.from_numpy(labels))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in training step {self._step}; lower the learning rate "
                f"(now {self._plan.learning_rate})"
            )
        network.backward(gradient)
        self._step += 1
        return loss, right

    def _update_weight(self, name: str, gradient: Tensor) -> None:
        self._layers[name].apply(gradient.contiguous().numpy().reshape(-1), self._step)

    def _update_side(self, name: str, gradient: Tensor) -> None:
        """SGD with momentum and coupled weight decay; clips stay positive."""
        tensor = self._side[name]
        decayed = gradient + self._plan.weight_decay * tensor
        if self._plan.momentum:
            held = self._side_momentum.get(name)
            decayed = decayed if held is None else held.mul_(self._plan.momentum).add_(decayed)
            self._side_momentum[name] = decayed
        tensor.sub_(decayed, alpha=self._plan.learning_rate)
        if name.endswith(".clip"):
            tensor.clamp_(min=float(MIN_CLIP))


def full_precision_logits(
    graph: Graph, weights: Weights, side: Side, images: NDArray[np.uint8], batch: int = 250
) -> NDArray[np.float32]:
    """Eval forward with full-precision weights and quantized activations: the accuracy of `W` itself."""
    tensors = {name: torch.from_numpy(tensor) for name, tensor in side.items()}
    one = torch.ones(())

    def weight(name: str) -> LayerWeight:
        return LayerWeight(torch.from_numpy(weights[name]), one, bound=0)

    with torch.no_grad():
        network = _Network(graph, tensors, weight, training=False)
        parts = [network.forward(images[i : i + batch]).numpy() for i in range(0, len(images), batch)]
    return np.concatenate(parts) if parts else np.zeros((0, *graph.shapes[graph.output]), np.float32)


def integer_products(
    codes: NDArray[np.int32], weight: NDArray[np.int8], op: Conv2d | Linear, bound: int
) -> NDArray[np.int32]:
    """Torch's sums of products for `integer_forward.logits`: the same integers as NumPy's, faster."""
    source = torch.from_numpy(codes).float()
    source = source.permute(0, 3, 1, 2) if source.ndim == 4 else source
    greatest = int(np.abs(weight.astype(np.int16)).max(initial=0))
    with torch.no_grad():
        sums = torch_ops.products(source, torch.from_numpy(weight).float(), op, bound * greatest)
    rows = sums.permute(0, 2, 3, 1) if sums.ndim == 4 else sums
    return rows.to(torch.int32).numpy()
