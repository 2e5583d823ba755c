"""The server's own images of a run: those it measures accuracy on, and those it measures statistics on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import Form
from fedmpq.data.value_range import ValueRange
from fedmpq.model.graph import Graph
from fedmpq.server.run_config import RunConfig, load_calibration_data, load_test_data
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


class RunImages:
    """Read once, when they are first asked for. Images that cannot be read are told of and done without: a
    round is worth more than its measurement."""

    def __init__(self, config: RunConfig, graph: Graph, class_names: Sequence[str]) -> None:
        self._config = config
        self._form = form_of(graph)
        self._class_names = class_names
        self._read: dict[str, Dataset] = {}

    def use_range(self, value_range: ValueRange) -> None:
        """What codes of measured values stand for."""
        self._form = replace(self._form, value_range=value_range)
        self._read.clear()

    def test(self) -> Dataset | None:
        """None: the run has none, or they cannot be read now."""
        return self._images("test", partial(load_test_data, self._config, self._form, self._class_names))

    def calibration(self) -> Dataset | None:
        """None: the run has none, or they cannot be read now."""
        return self._images("calibration", partial(load_calibration_data, self._config, self._form))

    def _images(self, what: str, load: Callable[[], Dataset | None]) -> Dataset | None:
        if what not in self._read:
            try:
                found = load()
            except DataError as error:
                say(log, f"no {what} data", level=logging.ERROR, run=self._config.name, error=str(error))
                return None
            if found is None:
                return None
            tell_skipped(what, self._config, found)
            self._read[what] = found
        return self._read[what]


def form_of(graph: Graph, value_range: ValueRange | None = None) -> Form:
    """What the graph takes."""
    return Form(graph.input.height, graph.input.width, graph.input.channels, value_range, graph.task)


def tell_skipped(what: str, config: RunConfig, data: Dataset) -> None:
    """Files that could not be read are left out, and named in the log."""
    if data.skipped:
        path, reason = data.skipped[0]
        say(
            log,
            f"files are left out of the {what} data",
            level=logging.WARNING,
            run=config.name,
            files=len(data.skipped),
            such_as=path,
            reason=reason,
        )
