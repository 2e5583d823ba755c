"""Operations to and from their protobuf messages.

An op's class and its message have the same name, as have their fields (`graph.proto` documents them), so one
loop serves all; a pair becomes a `Size`.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from fedmpq.model import ops
from fedmpq.model.dropout import Dropout
from fedmpq.model.task import CLASSIFICATION, TASKS, Task
from fedmpq.proto import graph_pb2

FORMAT_VERSIONS = (1, 2, 3)


def version_of(frozen: bool, task: Task) -> int:
    """1, as ever, unless a node is frozen or the task is another than classification.

    Boards that cannot keep a node so refuse version 2, those that have no other loss version 3.
    """
    if task != CLASSIFICATION:
        return 3
    return 2 if frozen else 1


def read_task(number: int) -> Task:
    """The task of a number; one that a newer version added is refused."""
    if not 0 <= number < len(TASKS):
        raise ops.GraphError(
            f"the graph has task {number}, unknown in format version {max(FORMAT_VERSIONS)}:"
            " update fedmpq on this side if the sender is newer"
        )
    return TASKS[number]


def _field_of(op: type[ops.Op]) -> str:
    """The field of a node's message that holds such an operation: `GlobalAvgPool` is `global_avg_pool`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", op.__name__).lower()


_OP_OF_FIELD = {_field_of(op): op for op in ops.RULES}


def write_op(op: ops.Op, node: graph_pb2.Node) -> None:
    """Sets `node`'s operation."""
    message = getattr(node, _field_of(type(op)))
    # An operation without fields would otherwise not count as chosen.
    message.SetInParent()
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, tuple):
            pair = graph_pb2.Size(height=value[0], width=value[1])
            getattr(message, field.name).CopyFrom(pair)
        else:
            setattr(message, field.name, value)


def read_op(node: graph_pb2.Node) -> ops.Op:
    """The operation of `node`; one that a newer version added is refused by its field number."""
    chosen = node.WhichOneof("op")
    if chosen is None:
        fields_unknown: Any = UnknownFieldSet(node)
        unknown = ", ".join(str(field.field_number) for field in list(fields_unknown)[:5])
        what = f"an operation of field number {unknown}, unknown" if unknown else "no operation, not valid"
        raise ops.GraphError(
            f"node {node.name[:128]!r} has {what} in format version {max(FORMAT_VERSIONS)}:"
            " update fedmpq on this side if the sender is newer"
        )
    op, message = _OP_OF_FIELD[chosen], getattr(node, chosen)
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(op)}
    return op(**{name: _plain(value) for name, value in values.items()})


def read_dropout(node: graph_pb2.Node) -> Dropout | None:
    """What the node drops in training."""
    if not node.HasField("dropout"):
        return None
    return Dropout(node.dropout.rate, node.dropout.whole_channels)


def _plain(value: Any) -> Any:
    return (value.height, value.width) if isinstance(value, graph_pb2.Size) else value
