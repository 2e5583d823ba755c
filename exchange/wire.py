"""What is sent in a round as bytes (messages of payload.proto), and bytes checked on their way in.

Decoding trusts nothing: whatever comes out has the graph's shapes, known bit-widths and finite numbers, or
a WireError names what is wrong. What depends on the round, such as whose update it is, the server checks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from fedmpq.exchange.messages import (
    Assignment,
    Calibration,
    Evaluation,
    Phase,
    TrainingPlan,
    Update,
    that_fit_half,
)
from fedmpq.kernels import decode_codes, encode_codes
from fedmpq.model import planes
from fedmpq.model.calibration import STATISTICS, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.metrics import BEST, WORST
from fedmpq.model.quantized import PackedLayer, Side
from fedmpq.proto import federation_pb2, payload_pb2

DIGEST_BYTES = 32
_PHASES: dict[Phase, federation_pb2.Phase] = {
    "training": federation_pb2.TRAINING,
    "calibration": federation_pb2.CALIBRATION,
}


class WireError(ValueError):
    """Bytes that are no such message, or a message that does not fit the graph."""


_ENCODINGS = {"half": "<f2", "single": "<f4"}
"""Of side tensors."""
_ANY_RUN = "0" * 32
"""As long as every run's id."""
_Evaluated = payload_pb2.UpdatePayload | payload_pb2.CalibrationPayload


def digest(data: bytes) -> bytes:
    """SHA-256: the name of a payload."""
    return hashlib.sha256(data).digest()


def encode_model(
    graph: Graph, layers: Mapping[str, PackedLayer], side: Side, *, coded: bool = False
) -> bytes:
    """The bytes of a `ModelPayload`; the same model gives the same bytes. `coded`: layers whose entropy code
    is shorter than their planes are sent as that."""
    return _model_message(graph, layers, side, coded).SerializeToString(deterministic=True)


def decode_model(graph: Graph, data: bytes) -> tuple[dict[str, PackedLayer], Side]:
    """The planes and side tensors of a `ModelPayload`."""
    message = payload_pb2.ModelPayload()
    _parse(message, data, "ModelPayload")
    return _layers(graph, message), _side(graph, message)


def encode_update(graph: Graph, run_id: str, update: Update, *, coded: bool = False) -> bytes:
    """The bytes of an `UpdatePayload`; `coded` as of `encode_model`."""
    message = payload_pb2.UpdatePayload(
        run_id=run_id,
        round=update.round,
        client=update.client,
        samples=update.samples,
        loss=update.loss,
        accuracy=update.accuracy,
        model=_model_message(graph, update.layers, update.side, coded),
    )
    _add_evaluation(message, update.evaluation)
    return message.SerializeToString(deterministic=True)


def decode_update(graph: Graph, data: bytes) -> tuple[str, Update]:
    """The run's id and the update of an `UpdatePayload`."""
    message = payload_pb2.UpdatePayload()
    _parse(message, data, "UpdatePayload")
    if not math.isfinite(message.loss):
        raise WireError(f"the loss is {message.loss}; it must be finite")
    if not 0 <= message.accuracy <= 1:
        raise WireError(f"the accuracy is {message.accuracy}; it must be in 0..1")
    return message.run_id, Update(
        round=message.round,
        client=message.client,
        samples=message.samples,
        layers=_layers(graph, message.model),
        side=_side(graph, message.model),
        loss=message.loss,
        accuracy=message.accuracy,
        evaluation=_evaluation(message),
    )


def encode_calibration(graph: Graph, run_id: str, calibration: Calibration) -> bytes:
    """The bytes of a `CalibrationPayload`."""
    message = payload_pb2.CalibrationPayload(
        run_id=run_id,
        round=calibration.round,
        client=calibration.client,
        samples=calibration.samples,
        statistics=_side_messages(calibration.statistics, statistics_names(graph)),
    )
    _add_evaluation(message, calibration.evaluation)
    return message.SerializeToString(deterministic=True)


def decode_calibration(graph: Graph, data: bytes) -> tuple[str, Calibration]:
    """The run's id and the statistics of a `CalibrationPayload`."""
    message = payload_pb2.CalibrationPayload()
    _parse(message, data, "CalibrationPayload")
    return message.run_id, Calibration(
        round=message.round,
        client=message.client,
        samples=message.samples,
        statistics=_statistics(graph, message),
        evaluation=_evaluation(message),
    )


def sent_bytes(graph: Graph, message: Assignment | Update | Calibration) -> int:
    """How many bytes of payload cross the network for it in a federation."""
    if isinstance(message, Assignment):
        return len(encode_model(graph, message.layers, message.side, coded=True))
    if isinstance(message, Update):
        return len(encode_update(graph, _ANY_RUN, message, coded=True))
    return len(encode_calibration(graph, _ANY_RUN, message))


def phase_to_message(phase: Phase) -> federation_pb2.Phase:
    return _PHASES[phase]


def phase_from_message(number: int) -> Phase:
    """The phase; one of a version to come is a WireError."""
    for phase, known in _PHASES.items():
        if known == number:
            return phase
    raise WireError(f"phase {number} is none of this version's; upgrade fedmpq")


def plan_to_message(plan: TrainingPlan) -> federation_pb2.TrainingPlan:
    """A plan that does not prune leaves `prune_density` out."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return federation_pb2.TrainingPlan(**{name: value for name, value in values.items() if value is not None})


def plan_from_message(message: federation_pb2.TrainingPlan) -> TrainingPlan:
    """The plan, its ranges checked (PlanError)."""
    values = {field.name: getattr(message, field.name) for field in fields(TrainingPlan)}
    if not message.HasField("prune_density"):
        values["prune_density"] = None
    return TrainingPlan(**values)


def calibration_bytes_bound(graph: Graph) -> int:
    """No honest `CalibrationPayload` of the graph is longer: all statistics in single precision."""
    shapes = graph.side_shapes()
    return sum(4 * math.prod(shapes[name]) + 64 for name in statistics_names(graph)) + 1024


def model_bytes_bound(graph: Graph) -> int:
    """No honest payload of the graph is longer: 8 bits and a step per channel everywhere, all single."""
    weights = sum(planes.nbytes(MAX_BITS, size) for size in graph.layer_sizes)
    steps = sum(4 * graph.weight_shape(node.name)[0] for node in graph.layers)
    side = sum(4 * math.prod(shape) for shape in graph.side_shapes().values())
    per_tensor = 64 * (len(graph.layers) + len(graph.side_shapes()))
    return weights + steps + side + per_tensor + 1024


def _model_message(
    graph: Graph, layers: Mapping[str, PackedLayer], side: Side, coded: bool
) -> payload_pb2.ModelPayload:
    sizes = zip(graph.layers, graph.layer_sizes, strict=True)
    return payload_pb2.ModelPayload(
        graph_id=bytes.fromhex(graph.id),
        layers=[_layer_message(layers[node.name], size if coded else None) for node, size in sizes],
        side=_side_messages(side, graph.side_shapes()),
    )


def _layer_message(layer: PackedLayer, size: int | None) -> payload_pb2.LayerPlanes:
    """`size` weights as an entropy code, if that is shorter; None: as planes in any case."""
    bits, steps = layer.bits, layer.step.astype("<f4").tobytes()
    if size is not None:
        codes = planes.unpack(layer.planes, (size,))
        if (coded := encode_codes(codes, bits, layer.planes.nbytes)) is not None:
            return payload_pb2.LayerPlanes(bits=bits, coded=coded, steps=steps)
    return payload_pb2.LayerPlanes(bits=bits, planes=layer.planes.tobytes(), steps=steps)


def _side_messages(side: Side, names: Iterable[str]) -> list[payload_pb2.SideTensor]:
    halves = that_fit_half(side)
    return [
        payload_pb2.SideTensor(half=side[name].astype("<f2").tobytes())
        if name in halves
        else payload_pb2.SideTensor(single=side[name].astype("<f4").tobytes())
        for name in names
    ]


def _parse(message: Message, data: bytes, kind: str) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"these {len(data)} bytes are no {kind}: {error}") from None


def _layers(graph: Graph, message: payload_pb2.ModelPayload) -> dict[str, PackedLayer]:
    if message.graph_id != bytes.fromhex(graph.id):
        got = message.graph_id.hex()[:12] or "none"
        raise WireError(f"the payload is of graph {got}, this run trains {graph.id[:12]} ({graph.name})")
    if len(message.layers) != len(graph.layers):
        raise WireError(f"the payload has {len(message.layers)} layers, the graph {len(graph.layers)}")
    return {
        node.name: _layer(node.name, graph.weight_shape(node.name), layer)
        for node, layer in zip(graph.layers, message.layers, strict=True)
    }


def _layer(name: str, shape: tuple[int, ...], message: payload_pb2.LayerPlanes) -> PackedLayer:
    bits, weights = message.bits, math.prod(shape)
    if not 1 <= bits <= MAX_BITS:
        raise WireError(f"layer {name!r} has {bits} bits; a weight has 1..{MAX_BITS}")
    packed = _decoded(name, weights, message) if message.coded else _packed(name, weights, message)
    return PackedLayer(packed, _step(name, shape[0], message.steps))


def _decoded(name: str, weights: int, message: payload_pb2.LayerPlanes) -> NDArray[np.uint8]:
    if message.planes:
        raise WireError(f"layer {name!r} has both planes and a code; it can have one of them")
    try:
        return planes.pack(decode_codes(message.coded, weights, message.bits), message.bits)
    except ValueError as error:
        raise WireError(f"layer {name!r} is damaged: {error}") from None


def _packed(name: str, weights: int, message: payload_pb2.LayerPlanes) -> NDArray[np.uint8]:
    bits = message.bits
    if len(message.planes) != planes.nbytes(bits, weights):
        raise WireError(
            f"layer {name!r} has {len(message.planes)} bytes of planes; {weights} weights at {bits} bits"
            f" take {planes.nbytes(bits, weights)}"
        )
    packed = np.frombuffer(message.planes, np.uint8).reshape(bits, -1)
    if (unused := -weights % 8) and (packed[:, -1] >> (8 - unused)).any():
        raise WireError(f"layer {name!r} has padding bits set in the last byte of a plane")
    return packed


def _step(name: str, channels: int, data: bytes) -> NDArray[np.float32]:
    if len(data) not in (4, 4 * channels):
        raise WireError(f"layer {name!r} has {len(data)} bytes of steps, not 4 or 4 * {channels} channels")
    step = np.frombuffer(data, "<f4").astype(np.float32)
    if not (np.isfinite(step).all() and (step > 0).all()):
        raise WireError(f"layer {name!r} has a step that is not positive and finite")
    return step.reshape(()) if len(data) == 4 else step


def _side(graph: Graph, message: payload_pb2.ModelPayload) -> Side:
    shapes = graph.side_shapes()
    if len(message.side) != len(shapes):
        raise WireError(f"the payload has {len(message.side)} side tensors, the graph {len(shapes)}")
    return _side_tensors(shapes, message.side)


def _statistics(graph: Graph, message: payload_pb2.CalibrationPayload) -> Side:
    names, shapes = statistics_names(graph), graph.side_shapes()
    if len(message.statistics) != len(names):
        raise WireError(f"the payload has {len(message.statistics)} statistics, the graph {len(names)}")
    found = _side_tensors({name: shapes[name] for name in names}, message.statistics)
    for name, tensor in found.items():
        if name.endswith(STATISTICS[1]) and (tensor < 0).any():
            raise WireError(f"side tensor {name!r} holds a negative variance")
    return found


def _side_tensors(shapes: Mapping[str, tuple[int, ...]], messages: Iterable[payload_pb2.SideTensor]) -> Side:
    """Tensors of those shapes, in their order. They are many and small: all of one precision are read at
    once."""
    data: dict[str, list[bytes]] = {kind: [] for kind in _ENCODINGS}
    places: list[tuple[str, tuple[int, ...], str, int, int]] = []
    ends = dict.fromkeys(_ENCODINGS, 0)
    for (name, shape), message in zip(shapes.items(), messages, strict=True):
        kind = message.WhichOneof("values")
        if kind is None:
            raise WireError(f"side tensor {name!r} is empty")
        values: bytes = message.half if kind == "half" else message.single
        count = math.prod(shape)
        if len(values) != count * (2 if kind == "half" else 4):
            raise WireError(
                f"side tensor {name!r} has {len(values)} bytes, not {count} values in {kind} precision"
            )
        data[kind].append(values)
        places.append((name, shape, kind, ends[kind], ends[kind] + count))
        ends[kind] += count
    joined = {
        kind: np.frombuffer(b"".join(data[kind]), encoding).astype(np.float32)
        for kind, encoding in _ENCODINGS.items()
    }
    side = {name: joined[kind][start:end].reshape(shape) for name, shape, kind, start, end in places}
    if not all(np.isfinite(values).all() for values in joined.values()):
        bad = next(name for name, tensor in side.items() if not np.isfinite(tensor).all())
        raise WireError(f"side tensor {bad!r} holds a NaN or an infinity; the training diverged")
    return side


def _add_evaluation(message: _Evaluated, evaluation: Evaluation | None) -> None:
    if evaluation is not None:
        message.evaluation.samples = evaluation.samples
        message.evaluation.correct = evaluation.correct
        if evaluation.score is not None:
            message.evaluation.score = evaluation.score


def _evaluation(message: _Evaluated) -> Evaluation | None:
    if not message.HasField("evaluation"):
        return None
    told = message.evaluation
    evaluation = Evaluation(told.samples, told.correct, told.score if told.HasField("score") else None)
    if evaluation.correct > evaluation.samples:
        raise WireError(f"{evaluation.correct} of {evaluation.samples} samples correct is more than all")
    if not WORST <= evaluation.value <= BEST:
        raise WireError(f"the score is {evaluation.value}; it must be in {WORST:g}..{BEST:g}")
    return evaluation
