"""A merged model on its way to the store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fedmpq.method.archive import Tensors, pack_model
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import GlobalModel
from fedmpq.method.usable_model import check_usable

Keep = Callable[[bytes], bytes]
"""Puts a model where it lasts, and says under what name."""


def not_kept(_: bytes) -> bytes:
    """For a model that is only tried."""
    return b""


def kept_if_usable(method: QuantizedMethod, model: GlobalModel, keep: Keep) -> bytes:
    """The name of the model's bytes, packed and kept while it is checked: most of the check is done in C++,
    which leaves Python to the packing and the disk. Raises as `check_usable` does; a blob that was kept of a
    model that cannot be used is one that no fact refers to, and swept as such."""
    with ThreadPoolExecutor(1, thread_name_prefix="pack") as thread:
        keeping = thread.submit(lambda: keep(pack_model(Tensors.of(model))))
        check_usable(method, model)
        return keeping.result()
