"""The method of a run as a server can conduct it."""

from __future__ import annotations

from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.registry import MethodError, buffering_method, integer_method
from fedmpq.model.graph import Graph
from fedmpq.server.run_config import ConfigError, RunConfig
from fedmpq.system.named_object import NamedObjectError


def served_method(config: RunConfig, graph: Graph) -> QuantizedMethod:
    """The method that the config names. It may be a class of one's own, if that derives from QuantizedMethod:
    the server packs what it quantizes, and checks what comes back against it."""
    try:
        method = integer_method(config, graph)
    except (MethodError, NamedObjectError) as error:
        raise ConfigError(str(error)) from None
    if not isinstance(method, QuantizedMethod):
        raise ConfigError(
            f"method = {config.method!r} is a {type(method).__name__}, which can be simulated, not served: a "
            "server checks every upload against what it sent, on the grids of QuantizedMethod; derive the "
            "class from fedmpq.method.quantized_method.QuantizedMethod"
        )
    if config.asynchronous is not None:
        try:
            return buffering_method(method)
        except MethodError as error:
            raise ConfigError(f"method = {config.method!r}: {error}") from None
    return method
