# mypy: disable-error-code=type-arg
import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("server_version", "run", "clients", "time")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    run: RunStatus
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    time: _timestamp_pb2.Timestamp
    def __init__(self, server_version: _Optional[str] = ..., run: _Optional[_Union[RunStatus, _Mapping]] = ..., clients: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "name", "state", "reason", "round", "rounds", "selected", "updates", "bytes_up", "bytes_down", "metrics", "created", "ended", "phase", "opened", "deadline", "waiting_since", "wanted")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WAITING_SINCE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    state: str
    reason: str
    round: int
    rounds: int
    selected: int
    updates: int
    bytes_up: int
    bytes_down: int
    metrics: RoundMetrics
    created: _timestamp_pb2.Timestamp
    ended: _timestamp_pb2.Timestamp
    phase: str
    opened: _timestamp_pb2.Timestamp
    deadline: _timestamp_pb2.Timestamp
    waiting_since: _timestamp_pb2.Timestamp
    wanted: int
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., selected: _Optional[int] = ..., updates: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., metrics: _Optional[_Union[RoundMetrics, _Mapping]] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., phase: _Optional[str] = ..., opened: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., waiting_since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., wanted: _Optional[int] = ...) -> None: ...

class RoundMetrics(_message.Message):
    __slots__ = ("round", "deployed_accuracy", "mean_deployed_accuracy", "measured_by", "loss", "seconds", "updates", "rejected", "cut", "bytes_up", "bytes_down", "bit_widths", "calibrated_by", "calibrated_on", "staleness", "metric", "others")
    class DeployedAccuracyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class OthersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DEPLOYED_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    MEAN_DEPLOYED_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BIT_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_BY_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_ON_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    deployed_accuracy: _containers.ScalarMap[str, float]
    mean_deployed_accuracy: float
    measured_by: str
    loss: float
    seconds: float
    updates: int
    rejected: int
    cut: int
    bytes_up: int
    bytes_down: int
    bit_widths: bytes
    calibrated_by: int
    calibrated_on: str
    staleness: float
    metric: str
    others: _containers.ScalarMap[str, float]
    def __init__(self, round: _Optional[int] = ..., deployed_accuracy: _Optional[_Mapping[str, float]] = ..., mean_deployed_accuracy: _Optional[float] = ..., measured_by: _Optional[str] = ..., loss: _Optional[float] = ..., seconds: _Optional[float] = ..., updates: _Optional[int] = ..., rejected: _Optional[int] = ..., cut: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., bit_widths: _Optional[bytes] = ..., calibrated_by: _Optional[int] = ..., calibrated_on: _Optional[str] = ..., staleness: _Optional[float] = ..., metric: _Optional[str] = ..., others: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client_id", "name", "client", "connected", "budget", "samples", "state", "bit_widths", "bytes_up", "bytes_down", "version", "engine", "accuracy", "reason", "max_samples", "max_budget", "last_seen", "certificate_ends", "free_bytes", "staleness")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BIT_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    name: str
    client: int
    connected: bool
    budget: float
    samples: int
    state: str
    bit_widths: bytes
    bytes_up: int
    bytes_down: int
    version: str
    engine: str
    accuracy: float
    reason: str
    max_samples: int
    max_budget: float
    last_seen: _timestamp_pb2.Timestamp
    certificate_ends: _timestamp_pb2.Timestamp
    free_bytes: int
    staleness: int
    def __init__(self, client_id: _Optional[str] = ..., name: _Optional[str] = ..., client: _Optional[int] = ..., connected: bool = ..., budget: _Optional[float] = ..., samples: _Optional[int] = ..., state: _Optional[str] = ..., bit_widths: _Optional[bytes] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., version: _Optional[str] = ..., engine: _Optional[str] = ..., accuracy: _Optional[float] = ..., reason: _Optional[str] = ..., max_samples: _Optional[int] = ..., max_budget: _Optional[float] = ..., last_seen: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., certificate_ends: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., free_bytes: _Optional[int] = ..., staleness: _Optional[int] = ...) -> None: ...

class StartRunRequest(_message.Message):
    __slots__ = ("config", "folder")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    config: str
    folder: str
    def __init__(self, config: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class SetRunRequest(_message.Message):
    __slots__ = ("run_id", "settings", "defaults")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    settings: str
    defaults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., settings: _Optional[str] = ..., defaults: _Optional[_Iterable[str]] = ...) -> None: ...

class StartRolloutRequest(_message.Message):
    __slots__ = ("run_id", "round", "canary", "max_errors", "soak_seconds", "formats")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    MAX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    SOAK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    canary: float
    max_errors: float
    soak_seconds: float
    formats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., canary: _Optional[float] = ..., max_errors: _Optional[float] = ..., soak_seconds: _Optional[float] = ..., formats: _Optional[_Iterable[str]] = ...) -> None: ...

class GetRolloutsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutsStatus(_message.Message):
    __slots__ = ("releases", "boards")
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    BOARDS_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[ReleaseStatus]
    boards: _containers.RepeatedCompositeFieldContainer[BoardModel]
    def __init__(self, releases: _Optional[_Iterable[_Union[ReleaseStatus, _Mapping]]] = ..., boards: _Optional[_Iterable[_Union[BoardModel, _Mapping]]] = ...) -> None: ...

class ReleaseStatus(_message.Message):
    __slots__ = ("version", "run", "round", "state", "reason", "formats", "canary", "good", "failed", "running", "max_errors", "soak_seconds", "created", "changed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_ERRORS_FIELD_NUMBER: _ClassVar[int]
    SOAK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    version: int
    run: str
    round: int
    state: str
    reason: str
    formats: _containers.RepeatedScalarFieldContainer[str]
    canary: int
    good: int
    failed: int
    running: int
    max_errors: float
    soak_seconds: float
    created: _timestamp_pb2.Timestamp
    changed: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[int] = ..., run: _Optional[str] = ..., round: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., formats: _Optional[_Iterable[str]] = ..., canary: _Optional[int] = ..., good: _Optional[int] = ..., failed: _Optional[int] = ..., running: _Optional[int] = ..., max_errors: _Optional[float] = ..., soak_seconds: _Optional[float] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., changed: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class BoardModel(_message.Message):
    __slots__ = ("name", "format", "version", "wanted", "pinned", "ok", "errors", "reason", "reported")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    format: str
    version: int
    wanted: int
    pinned: int
    ok: int
    errors: int
    reason: str
    reported: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., format: _Optional[str] = ..., version: _Optional[int] = ..., wanted: _Optional[int] = ..., pinned: _Optional[int] = ..., ok: _Optional[int] = ..., errors: _Optional[int] = ..., reason: _Optional[str] = ..., reported: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PinBoardRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...
