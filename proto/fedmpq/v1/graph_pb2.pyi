# mypy: disable-error-code=type-arg
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLASSIFICATION: _ClassVar[Task]
    MULTI_LABEL: _ClassVar[Task]
    REGRESSION: _ClassVar[Task]
    RECONSTRUCTION: _ClassVar[Task]
CLASSIFICATION: Task
MULTI_LABEL: Task
REGRESSION: Task
RECONSTRUCTION: Task

class Graph(_message.Message):
    __slots__ = ("format_version", "name", "input", "nodes", "output", "task")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    name: str
    input: Input
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    output: str
    task: Task
    def __init__(self, format_version: _Optional[int] = ..., name: _Optional[str] = ..., input: _Optional[_Union[Input, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., output: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("channels", "height", "width", "scale", "zero_point")
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ZERO_POINT_FIELD_NUMBER: _ClassVar[int]
    channels: int
    height: int
    width: int
    scale: float
    zero_point: int
    def __init__(self, channels: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., scale: _Optional[float] = ..., zero_point: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "inputs", "conv2d", "linear", "batch_norm", "relu", "quantize", "add", "max_pool", "avg_pool", "global_avg_pool", "flatten", "lookup", "mul", "concat", "adaptive_avg_pool", "slice", "channel_shuffle", "pad", "upsample", "frozen", "dropout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CONV2D_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORM_FIELD_NUMBER: _ClassVar[int]
    RELU_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    MAX_POOL_FIELD_NUMBER: _ClassVar[int]
    AVG_POOL_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_AVG_POOL_FIELD_NUMBER: _ClassVar[int]
    FLATTEN_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    MUL_FIELD_NUMBER: _ClassVar[int]
    CONCAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_AVG_POOL_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    UPSAMPLE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    inputs: _containers.RepeatedScalarFieldContainer[str]
    conv2d: Conv2d
    linear: Linear
    batch_norm: BatchNorm
    relu: Relu
    quantize: Quantize
    add: Add
    max_pool: MaxPool
    avg_pool: AvgPool
    global_avg_pool: GlobalAvgPool
    flatten: Flatten
    lookup: Lookup
    mul: Mul
    concat: Concat
    adaptive_avg_pool: AdaptiveAvgPool
    slice: Slice
    channel_shuffle: ChannelShuffle
    pad: Pad
    upsample: Upsample
    frozen: bool
    dropout: Dropout
    def __init__(self, name: _Optional[str] = ..., inputs: _Optional[_Iterable[str]] = ..., conv2d: _Optional[_Union[Conv2d, _Mapping]] = ..., linear: _Optional[_Union[Linear, _Mapping]] = ..., batch_norm: _Optional[_Union[BatchNorm, _Mapping]] = ..., relu: _Optional[_Union[Relu, _Mapping]] = ..., quantize: _Optional[_Union[Quantize, _Mapping]] = ..., add: _Optional[_Union[Add, _Mapping]] = ..., max_pool: _Optional[_Union[MaxPool, _Mapping]] = ..., avg_pool: _Optional[_Union[AvgPool, _Mapping]] = ..., global_avg_pool: _Optional[_Union[GlobalAvgPool, _Mapping]] = ..., flatten: _Optional[_Union[Flatten, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., mul: _Optional[_Union[Mul, _Mapping]] = ..., concat: _Optional[_Union[Concat, _Mapping]] = ..., adaptive_avg_pool: _Optional[_Union[AdaptiveAvgPool, _Mapping]] = ..., slice: _Optional[_Union[Slice, _Mapping]] = ..., channel_shuffle: _Optional[_Union[ChannelShuffle, _Mapping]] = ..., pad: _Optional[_Union[Pad, _Mapping]] = ..., upsample: _Optional[_Union[Upsample, _Mapping]] = ..., frozen: bool = ..., dropout: _Optional[_Union[Dropout, _Mapping]] = ...) -> None: ...

class Dropout(_message.Message):
    __slots__ = ("rate", "whole_channels")
    RATE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    rate: float
    whole_channels: bool
    def __init__(self, rate: _Optional[float] = ..., whole_channels: bool = ...) -> None: ...

class Size(_message.Message):
    __slots__ = ("height", "width")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class Conv2d(_message.Message):
    __slots__ = ("in_channels", "out_channels", "kernel", "stride", "padding", "dilation", "groups", "bias")
    IN_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    OUT_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DILATION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    in_channels: int
    out_channels: int
    kernel: Size
    stride: Size
    padding: Size
    dilation: Size
    groups: int
    bias: bool
    def __init__(self, in_channels: _Optional[int] = ..., out_channels: _Optional[int] = ..., kernel: _Optional[_Union[Size, _Mapping]] = ..., stride: _Optional[_Union[Size, _Mapping]] = ..., padding: _Optional[_Union[Size, _Mapping]] = ..., dilation: _Optional[_Union[Size, _Mapping]] = ..., groups: _Optional[int] = ..., bias: bool = ...) -> None: ...

class Linear(_message.Message):
    __slots__ = ("in_features", "out_features", "bias")
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    in_features: int
    out_features: int
    bias: bool
    def __init__(self, in_features: _Optional[int] = ..., out_features: _Optional[int] = ..., bias: bool = ...) -> None: ...

class BatchNorm(_message.Message):
    __slots__ = ("channels", "eps", "momentum")
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    channels: int
    eps: float
    momentum: float
    def __init__(self, channels: _Optional[int] = ..., eps: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class Relu(_message.Message):
    __slots__ = ("maximum",)
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    maximum: float
    def __init__(self, maximum: _Optional[float] = ...) -> None: ...

class Quantize(_message.Message):
    __slots__ = ("bits", "signed")
    BITS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    bits: int
    signed: bool
    def __init__(self, bits: _Optional[int] = ..., signed: bool = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Concat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MaxPool(_message.Message):
    __slots__ = ("kernel", "stride", "padding", "ceil_mode")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CEIL_MODE_FIELD_NUMBER: _ClassVar[int]
    kernel: Size
    stride: Size
    padding: Size
    ceil_mode: bool
    def __init__(self, kernel: _Optional[_Union[Size, _Mapping]] = ..., stride: _Optional[_Union[Size, _Mapping]] = ..., padding: _Optional[_Union[Size, _Mapping]] = ..., ceil_mode: bool = ...) -> None: ...

class AvgPool(_message.Message):
    __slots__ = ("kernel", "stride", "padding", "ceil_mode", "exclude_padding")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CEIL_MODE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_PADDING_FIELD_NUMBER: _ClassVar[int]
    kernel: Size
    stride: Size
    padding: Size
    ceil_mode: bool
    exclude_padding: bool
    def __init__(self, kernel: _Optional[_Union[Size, _Mapping]] = ..., stride: _Optional[_Union[Size, _Mapping]] = ..., padding: _Optional[_Union[Size, _Mapping]] = ..., ceil_mode: bool = ..., exclude_padding: bool = ...) -> None: ...

class GlobalAvgPool(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdaptiveAvgPool(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: Size
    def __init__(self, size: _Optional[_Union[Size, _Mapping]] = ...) -> None: ...

class Flatten(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("function", "parameter")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    function: str
    parameter: float
    def __init__(self, function: _Optional[str] = ..., parameter: _Optional[float] = ...) -> None: ...

class Mul(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Slice(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ChannelShuffle(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: int
    def __init__(self, groups: _Optional[int] = ...) -> None: ...

class Pad(_message.Message):
    __slots__ = ("before", "after")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    before: Size
    after: Size
    def __init__(self, before: _Optional[_Union[Size, _Mapping]] = ..., after: _Optional[_Union[Size, _Mapping]] = ...) -> None: ...

class Upsample(_message.Message):
    __slots__ = ("factor",)
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    factor: Size
    def __init__(self, factor: _Optional[_Union[Size, _Mapping]] = ...) -> None: ...
