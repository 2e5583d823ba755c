"""Methods by name: the six built-in ones, or a class of one's own as "package.module:Class"."""

from __future__ import annotations

from typing import Protocol

from fedmpq.method.float_method import FloatMethod
from fedmpq.method.protocol import IntegerMethod
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import QUANTIZED_METHODS, Recipe
from fedmpq.method.settings import MethodSettings
from fedmpq.model.graph import Graph
from fedmpq.system.named_object import is_path, load_object


class MethodError(ValueError):
    """A method that cannot be used as asked."""


class MakesMethod(Protocol):
    """A method's class: made from the graph, the recipe that the settings come to, and the seed."""

    def __call__(self, graph: Graph, recipe: Recipe, seed: int) -> IntegerMethod: ...


def integer_method(settings: MethodSettings, graph: Graph, own: MakesMethod | None = None) -> IntegerMethod:
    """The method whose clients train integer codes; `own` in place of the class that the settings name."""
    if settings.trains_floats:
        raise MethodError(
            f"method = {settings.method!r} trains in full precision; this takes one that trains integer "
            f"models: {', '.join(QUANTIZED_METHODS)}, or a class of your own as package.module:Class"
        )
    arguments = graph, settings.recipe(), settings.seed
    if own is not None:
        return own(*arguments)
    if is_path(settings.method):
        return load_object(settings.method, IntegerMethod, "method", *arguments)
    return QuantizedMethod(*arguments)


def buffering_method(method: object) -> QuantizedMethod:
    """The method, if it merges changes of several versions of the model as the built-in ones do."""
    if not isinstance(method, QuantizedMethod) or type(method).merge is not QuantizedMethod.merge:
        raise MethodError(
            f"{type(method).__name__} merges by itself, and does not go with asynchronous, where changes of "
            "several versions of the model are merged; use a QuantizedMethod without a merge of its own"
        )
    return method


def float_method(settings: MethodSettings, graph: Graph) -> FloatMethod:
    """The method whose clients train in full precision."""
    return FloatMethod(graph, settings.float_recipe(), settings.seed)
