# mypy: disable-error-code=type-arg
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINING: _ClassVar[Phase]
    CALIBRATION: _ClassVar[Phase]
TRAINING: Phase
CALIBRATION: Phase

class EnrollRequest(_message.Message):
    __slots__ = ("token", "name", "budget", "version")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    token: str
    name: str
    budget: float
    version: str
    def __init__(self, token: _Optional[str] = ..., name: _Optional[str] = ..., budget: _Optional[float] = ..., version: _Optional[str] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("client_id", "secret")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    secret: str
    def __init__(self, client_id: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("budget", "samples", "version", "engine", "answers", "low", "high", "free_bytes", "confirms")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONFIRMS_FIELD_NUMBER: _ClassVar[int]
    budget: float
    samples: int
    version: str
    engine: str
    answers: bool
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    free_bytes: int
    confirms: bool
    def __init__(self, budget: _Optional[float] = ..., samples: _Optional[int] = ..., version: _Optional[str] = ..., engine: _Optional[str] = ..., answers: bool = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., free_bytes: _Optional[int] = ..., confirms: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("welcome", "run", "assignment", "cancelled", "run_ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    run: RunDescription
    assignment: Assignment
    cancelled: Cancelled
    run_ended: RunEnded
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., run: _Optional[_Union[RunDescription, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., cancelled: _Optional[_Union[Cancelled, _Mapping]] = ..., run_ended: _Optional[_Union[RunEnded, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("server_version", "chunk_bytes")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    chunk_bytes: int
    def __init__(self, server_version: _Optional[str] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class RunDescription(_message.Message):
    __slots__ = ("run_id", "name", "graph_id", "graph_bytes", "class_names", "rounds", "plan", "low", "high")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRAPH_ID_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAMES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    graph_id: bytes
    graph_bytes: int
    class_names: _containers.RepeatedScalarFieldContainer[str]
    rounds: int
    plan: TrainingPlan
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., graph_id: _Optional[bytes] = ..., graph_bytes: _Optional[int] = ..., class_names: _Optional[_Iterable[str]] = ..., rounds: _Optional[int] = ..., plan: _Optional[_Union[TrainingPlan, _Mapping]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("run_id", "round", "client", "seed", "payload", "payload_bytes", "plan", "seconds_left", "evaluate", "bit_widths", "phase", "coded_payload", "coded_bytes", "reads_coded")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    BIT_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CODED_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_CODED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    client: int
    seed: int
    payload: bytes
    payload_bytes: int
    plan: TrainingPlan
    seconds_left: float
    evaluate: bool
    bit_widths: bytes
    phase: Phase
    coded_payload: bytes
    coded_bytes: int
    reads_coded: bool
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., client: _Optional[int] = ..., seed: _Optional[int] = ..., payload: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., plan: _Optional[_Union[TrainingPlan, _Mapping]] = ..., seconds_left: _Optional[float] = ..., evaluate: bool = ..., bit_widths: _Optional[bytes] = ..., phase: _Optional[_Union[Phase, str]] = ..., coded_payload: _Optional[bytes] = ..., coded_bytes: _Optional[int] = ..., reads_coded: bool = ...) -> None: ...

class TrainingPlan(_message.Message):
    __slots__ = ("epochs", "batch_size", "learning_rate", "momentum", "momentum_bits", "weight_decay", "update", "code_learning_rate", "lasso", "prune_density", "pad", "flip", "side_bits", "logit_adjustment")
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_BITS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CODE_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LASSO_FIELD_NUMBER: _ClassVar[int]
    PRUNE_DENSITY_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    SIDE_BITS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_ADJUSTMENT_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    momentum_bits: int
    weight_decay: float
    update: str
    code_learning_rate: float
    lasso: float
    prune_density: float
    pad: int
    flip: bool
    side_bits: int
    logit_adjustment: float
    def __init__(self, epochs: _Optional[int] = ..., batch_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., momentum_bits: _Optional[int] = ..., weight_decay: _Optional[float] = ..., update: _Optional[str] = ..., code_learning_rate: _Optional[float] = ..., lasso: _Optional[float] = ..., prune_density: _Optional[float] = ..., pad: _Optional[int] = ..., flip: bool = ..., side_bits: _Optional[int] = ..., logit_adjustment: _Optional[float] = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("run_id", "round", "reason", "phase")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    reason: str
    phase: Phase
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., reason: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("run_id", "state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("payload", "offset", "chunk_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    offset: int
    chunk_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., offset: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class GetUploadRequest(_message.Message):
    __slots__ = ("run_id", "round", "payload", "phase")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    payload: bytes
    phase: Phase
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., payload: _Optional[bytes] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class UploadStatus(_message.Message):
    __slots__ = ("offset", "receipt")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    receipt: Receipt
    def __init__(self, offset: _Optional[int] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("run_id", "round", "payload", "payload_bytes", "offset", "phase")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    payload: bytes
    payload_bytes: int
    offset: int
    phase: Phase
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., payload: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("run_id", "round", "payload", "receipt_id", "phase")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    payload: bytes
    receipt_id: str
    phase: Phase
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., payload: _Optional[bytes] = ..., receipt_id: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class DeclineRequest(_message.Message):
    __slots__ = ("run_id", "round", "phase", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    phase: Phase
    reason: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DeclineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("run_id", "samples")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    samples: int
    def __init__(self, run_id: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class ReadyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("format",)
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    format: str
    def __init__(self, format: _Optional[str] = ...) -> None: ...

class ModelOffer(_message.Message):
    __slots__ = ("payload", "payload_bytes", "file_name", "card", "version", "ask_again_seconds")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ASK_AGAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    payload_bytes: int
    file_name: str
    card: str
    version: int
    ask_again_seconds: int
    def __init__(self, payload: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., file_name: _Optional[str] = ..., card: _Optional[str] = ..., version: _Optional[int] = ..., ask_again_seconds: _Optional[int] = ...) -> None: ...

class ReportModelRequest(_message.Message):
    __slots__ = ("version", "format", "ok", "errors", "reason", "running")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    version: int
    format: str
    ok: int
    errors: int
    reason: str
    running: bool
    def __init__(self, version: _Optional[int] = ..., format: _Optional[str] = ..., ok: _Optional[int] = ..., errors: _Optional[int] = ..., reason: _Optional[str] = ..., running: bool = ...) -> None: ...

class ReportModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
