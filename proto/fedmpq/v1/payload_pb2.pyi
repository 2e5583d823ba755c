# mypy: disable-error-code=type-arg
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelPayload(_message.Message):
    __slots__ = ("graph_id", "layers", "side")
    GRAPH_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    graph_id: bytes
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlanes]
    side: _containers.RepeatedCompositeFieldContainer[SideTensor]
    def __init__(self, graph_id: _Optional[bytes] = ..., layers: _Optional[_Iterable[_Union[LayerPlanes, _Mapping]]] = ..., side: _Optional[_Iterable[_Union[SideTensor, _Mapping]]] = ...) -> None: ...

class LayerPlanes(_message.Message):
    __slots__ = ("bits", "planes", "steps", "coded")
    BITS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CODED_FIELD_NUMBER: _ClassVar[int]
    bits: int
    planes: bytes
    steps: bytes
    coded: bytes
    def __init__(self, bits: _Optional[int] = ..., planes: _Optional[bytes] = ..., steps: _Optional[bytes] = ..., coded: _Optional[bytes] = ...) -> None: ...

class SideTensor(_message.Message):
    __slots__ = ("single", "half")
    SINGLE_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    single: bytes
    half: bytes
    def __init__(self, single: _Optional[bytes] = ..., half: _Optional[bytes] = ...) -> None: ...

class UpdatePayload(_message.Message):
    __slots__ = ("run_id", "round", "client", "samples", "loss", "accuracy", "evaluation", "model")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    client: int
    samples: int
    loss: float
    accuracy: float
    evaluation: Evaluation
    model: ModelPayload
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., client: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., model: _Optional[_Union[ModelPayload, _Mapping]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("samples", "correct", "score")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    samples: int
    correct: int
    score: float
    def __init__(self, samples: _Optional[int] = ..., correct: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class CalibrationPayload(_message.Message):
    __slots__ = ("run_id", "round", "client", "samples", "statistics", "evaluation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    client: int
    samples: int
    statistics: _containers.RepeatedCompositeFieldContainer[SideTensor]
    evaluation: Evaluation
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., client: _Optional[int] = ..., samples: _Optional[int] = ..., statistics: _Optional[_Iterable[_Union[SideTensor, _Mapping]]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ...) -> None: ...
