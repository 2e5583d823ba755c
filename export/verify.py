"""Exported models against the integer reference: what every target's verification has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.export.format import ExportError
from fedmpq.export.target import Images, Reals
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.integer_forward import trace_values
from fedmpq.model.integer_program import IntegerProgram
from fedmpq.model.native_products import native_products

Values = dict[str, NDArray[Any]]
"""Codes by the name of their value; images are (N, H, W, C)."""


def random_images(graph: Graph, count: int, seed: int = 0) -> Images:
    """Noise, and at the ends a black and a white image."""
    image = graph.input
    shape = (count, image.height, image.width, image.channels)
    images = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    images[0], images[-1] = 0, 255
    return images


def require_logits(
    runtime: str,
    model: DeployedModel,
    images: Images,
    got: Reals,
    *,
    tolerance: float = 0.0,
    values: Callable[[Images], Values] | None = None,
) -> None:
    """Raises `ExportError` unless `got` are the reference's logits of `images`.

    They may differ by `tolerance` times the greatest of the reference's, or of 1 if that is greater; by
    default not in a single bit. `values` computes what the runtime has of some images, so that the error can
    name the first value that differs.
    """
    expected = model.logits(images)
    if got.shape != expected.shape:
        raise ExportError(
            f"{runtime} gives logits of shape {got.shape} for {model.graph.name!r}, not {expected.shape}"
        )
    limit = tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
    # Not "further than": what is no number is wrong too.
    wrong = np.flatnonzero(~(np.abs(got - expected) <= limit).all(axis=1))[:1]
    if len(wrong):
        some = images[wrong]
        first = None if values is None else first_difference(model.program, some, values(some))
        raise ExportError(
            f"{runtime} computes {first or model.program.output!r} of {model.graph.name!r} otherwise than the"
            " integer reference; the file is deleted. Please report it with the run's checkpoint"
        )


def first_difference(program: IntegerProgram, images: Images, values: Values) -> str | None:
    """The first of the given values, in order of execution, that differs from the reference's."""
    expected = trace_values(program, images, products=native_products)
    for step in program.steps:
        if step.output in values and not np.array_equal(values[step.output], expected[step.output]):
            return step.output
    return None


def channels_last(values: NDArray[Any]) -> NDArray[Any]:
    """A runtime's images (N, C, H, W) as (N, H, W, C); anything else as it is."""
    return values.transpose(0, 2, 3, 1) if values.ndim == 4 else values
