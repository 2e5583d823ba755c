"""The `torch` engine: the readable reference of local training.

Codes, and under the carried rule 256ths of a code beside them, are the only weights kept between steps. A
layer's weights exist as floats while that layer computes, and its codes are updated the moment its gradient
is known, so no gradient of the whole model exists either.

Runs repeat to the bit on one machine with one number of torch threads; another number adds up the gradients
in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpq.exchange.change import Fractions
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.activations import MIN_CLIP, CodeFormat
from fedmpq.model.graph import (
    INPUT,
    Add,
    BatchNorm,
    Conv2d,
    Graph,
    Linear,
    Lookup,
    Mul,
    Node,
    Quantize,
    Relu,
)
from fedmpq.model.integer_forward import cached_batch
from fedmpq.model.never import assert_never
from fedmpq.model.ops import ShapeOp
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights
from fedmpq.model.quantizers import bound_before
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.model.state_checks import check_state
from fedmpq.model.task import Answers, answers_of
from fedmpq.training import torch_losses, torch_ops, torch_shapes, update
from fedmpq.training.engine import Batch, EpochResult, Shift, TrainingError
from fedmpq.training.losses import answers_each
from fedmpq.training.momentum import make_momentum
from fedmpq.training.torch_ops import Backward, LayerWeight, Value

WeightSource = Callable[[str], LayerWeight]


class _TrainedLayer:
    """One layer's codes, momentum and Lasso table during a round."""

    def __init__(
        self, index: int, name: str, layer: QuantizedLayer, plan: TrainingPlan, draws: Draws
    ) -> None:
        self.codes = layer.codes.reshape(-1).copy()
        self._index = index
        self._name = name
        self._shape = layer.codes.shape
        self._bits = layer.bits
        self._step = layer.step
        self._plan = plan
        self._draws = draws
        self._momentum = make_momentum(self.codes.size, plan.momentum, plan.momentum_bits)
        self.fractions = np.zeros(self.codes.size, np.int8) if plan.update == "carried" else None
        paper = np.float32(plan.learning_rate) * layer.step
        carried = np.float32(plan.code_learning_rate) / layer.step
        self._rate = np.asarray(paper if self.fractions is None else carried, dtype=np.float32)
        self._pull = np.zeros(0, np.float32)

    def quantized(self) -> QuantizedLayer:
        return QuantizedLayer(self.codes.reshape(self._shape), self._bits, self._step)

    def weight(self) -> LayerWeight:
        layer = self.quantized()
        tensor = torch.from_numpy(layer.integer_weights()).float()
        bound = 127 if self._bits == 8 else 2**self._bits - 1
        return LayerWeight(tensor, torch.tensor(layer.integer_scale()), bound)

    def refresh_lasso(self, strength: float) -> None:
        """The Lasso's table from the planes as they are at the start of an epoch."""
        if strength > 0:
            self._pull = update.lasso_pull(self.codes, self._bits, strength)

    def apply(self, gradient: NDArray[np.float32], step: int) -> None:
        """Weight decay, momentum, the stochastic move and the Lasso's."""
        decay = np.float32(self._plan.weight_decay) * self.quantized().weights().reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            direction = self._momentum.push(gradient + decay)
        if not np.isfinite(direction).all():
            raise _diverged(f"the gradient of layer {self._name!r} is not finite", step, self._plan)
        uniforms = self._uniform(Purpose.UPDATE, step)
        if self.fractions is None:
            self.codes = update.paper_update(self.codes, direction, self._rates(), self._bits, uniforms)
            if self._pull.any():
                uniforms = self._uniform(Purpose.LASSO, step)
                self.codes = update.lasso_update(self.codes, self._pull, self._bits, uniforms)
            return
        with np.errstate(over="ignore"):
            move = direction * self._rates()
        self.codes, self.fractions = update.carried_update(
            self.codes, self.fractions, move, self._bits, uniforms
        )

    def _rates(self) -> NDArray[np.float32]:
        """One rate for all weights, or one each: spread anew every time, being as large as the weights."""
        return np.repeat(self._rate, self.codes.size // self._rate.size) if self._rate.ndim else self._rate

    def _uniform(self, purpose: Purpose, step: int) -> NDArray[np.float32]:
        return self._draws.uniform(self.codes.size, purpose, layer=self._index, step=step)


class _Network:
    """A graph walked forwards, keeping what the way back needs."""

    def __init__(
        self, graph: Graph, side: Mapping[str, Tensor], weights: WeightSource, training: bool
    ) -> None:
        self.graph = graph
        self.side = side
        self.weights = weights
        self.training = training
        self.dropped: Callable[[Node, Value], tuple[Value, Backward]] | None = None
        """What a layer with dropout reads in training, and the way back from there."""
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
        return values[self.graph.output].real()

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
            # The quantization that follows carries out the clamp.
            return value, lambda gradient: (gradient,)
        if isinstance(op, Quantize):
            return self._quantize(node, op, value)
        if isinstance(op, Add | Mul):
            combine = torch_ops.add if isinstance(op, Add) else torch_ops.multiply
            return combine(*inputs)
        if isinstance(op, Lookup):
            return torch_ops.lookup(value, op)
        if isinstance(op, ShapeOp):
            return torch_shapes.apply(op, inputs)
        assert_never(op)

    def _product(self, node: Node, op: Conv2d | Linear, value: Value) -> tuple[Value, Backward]:
        if self.dropped is not None and node.dropout is not None:
            value, back = self.dropped(node, value)
            out, own = self._product_of(node, op, value)
            return out, lambda gradient: _through(own(gradient), back)
        return self._product_of(node, op, value)

    def _product_of(self, node: Node, op: Conv2d | Linear, value: Value) -> tuple[Value, Backward]:
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
        clip, maximum = np.float32(self.side[name]), bound_before(self.graph, node)
        form = CodeFormat.quantized(clip, maximum, op.bits, op.signed)
        out, back = torch_ops.quantize(value, form, clip_is_free=not 0 < maximum <= clip)

        def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
            source, d_clip = back(gradient)
            self.on_side(name, d_clip)
            return (source,)

        return out, backward


def _through(gradients: tuple[Tensor | None, ...], back: Backward) -> tuple[Tensor | None, ...]:
    """A layer's gradient taken back through its dropout; there is none of the image."""
    (gradient,) = gradients
    return (None,) if gradient is None else back(gradient)


class TorchEngine:
    """Trains with torch on the CPU; see `Engine`. `threads` is torch's own setting, for the whole process."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)

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
        self._shift = None if shift is None else torch.from_numpy(shift.copy())
        self._graph = graph
        self._plan = plan
        self._draws = draws
        self._layers = {
            node.name: _TrainedLayer(index, node.name, layers[node.name], plan, draws)
            for index, node in enumerate(graph.layers)
        }
        self._side = {name: torch.from_numpy(tensor.copy()) for name, tensor in side.items()}
        self._side_momentum: dict[str, Tensor] = {}
        self._step = 0

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        strength = self._plan.learning_rate * self._plan.lasso / sum(self._graph.layer_sizes)
        for layer in self._layers.values():
            layer.refresh_lasso(strength * layer.codes.size)
        samples, loss_sum, right_sum = 0, 0.0, 0
        with torch.no_grad():
            for images, given in batches:
                loss, right = self._train_step(images, answers_of(self._graph, images, given))
                samples += len(images)
                loss_sum += loss * len(images)
                right_sum += right
        answers = samples * answers_each(self._graph)
        return EpochResult(samples, loss_sum / max(1, samples), right_sum / max(1, answers))

    def layers(self) -> Layers:
        return {name: layer.quantized() for name, layer in self._layers.items()}

    def fractions(self) -> dict[str, Fractions]:
        held = {name: layer.fractions for name, layer in self._layers.items()}
        return {name: fractions.copy() for name, fractions in held.items() if fractions is not None}

    def side(self) -> Side:
        return {name: tensor.numpy().copy() for name, tensor in self._side.items()}

    def rest(self) -> None:
        """A step's memory is torch's own, which keeps what it has."""

    def _train_step(self, images: NDArray[np.uint8], answers: Answers) -> tuple[float, int]:
        network = _Network(self._graph, self._side, lambda name: self._layers[name].weight(), training=True)
        network.on_weight, network.on_side = self._update_weight, self._update_side
        network.dropped = self._dropped
        logits = network.forward(images)
        outputs = torch_losses.shifted(self._graph.task, logits, self._shift)
        loss, right, gradient = torch_losses.judged(self._graph.task, outputs, torch.from_numpy(answers))
        if not math.isfinite(loss):
            raise _diverged(f"the loss is {loss}", self._step, self._plan)
        network.backward(gradient)
        self._step += 1
        return loss, right

    def _dropped(self, node: Node, value: Value) -> tuple[Value, Backward]:
        assert node.dropout is not None
        index = self._graph.layers.index(node)
        return torch_shapes.drop(value, node.dropout, self._draws, index, self._step)

    def _update_weight(self, name: str, gradient: Tensor) -> None:
        if name not in self._graph.frozen_layers:
            self._layers[name].apply(gradient.contiguous().numpy().reshape(-1), self._step)

    def _update_side(self, name: str, gradient: Tensor) -> None:
        """SGD with momentum and coupled weight decay; clips stay positive, and frozen ones as they are."""
        if name in self._graph.frozen_side:
            return
        tensor = self._side[name]
        decayed = gradient + self._plan.weight_decay * tensor
        if self._plan.momentum:
            held = self._side_momentum.get(name)
            decayed = decayed if held is None else held.mul_(self._plan.momentum).add_(decayed)
            self._side_momentum[name] = decayed
        if not torch.isfinite(decayed).all():
            raise _diverged(f"the gradient of {name!r} is not finite", self._step, self._plan)
        tensor.sub_(decayed, alpha=self._plan.learning_rate)
        if name.endswith(".clip"):
            tensor.clamp_(min=float(MIN_CLIP))


def _diverged(what: str, step: int, plan: TrainingPlan) -> TrainingError:
    return TrainingError(
        f"{what} in training step {step}; lower the learning rate (now {plan.learning_rate})"
    )


def full_precision_logits(
    graph: Graph, weights: Weights, side: Side, images: NDArray[np.uint8], batch: int | None = None
) -> NDArray[np.float32]:
    """Eval forward with full-precision weights and quantized activations: the accuracy of `W` itself."""
    tensors = {name: torch.tensor(tensor) for name, tensor in side.items()}
    layers = {name: LayerWeight(torch.tensor(tensor), torch.ones(()), 0) for name, tensor in weights.items()}
    batch = batch or cached_batch(graph)
    with torch.no_grad():
        network = _Network(graph, tensors, layers.__getitem__, training=False)
        parts = [network.forward(images[i : i + batch]).numpy() for i in range(0, len(images), batch)]
    return np.concatenate(parts) if parts else np.zeros((0, *graph.shapes[graph.output]), np.float32)
