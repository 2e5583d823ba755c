"""The server's own images of a run: those it measures accuracy on, and those it measures statistics on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.server.run_config import RunConfig, load_calibration_data, load_test_data
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


class RunImages:
    """Read once, when they are first asked for. Images that cannot be read are told of and done without: a
    round is worth more than its measurement."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._read: dict[str, Dataset] = {}

    def test(self) -> Dataset | None:
        """None: the run has none, or they cannot be read now."""
        return self._images("test", load_test_data)

    def calibration(self) -> Dataset | None:
        """None: the run has none, or they cannot be read now."""
        return self._images("calibration", load_calibration_data)

    def _images(self, what: str, load: Callable[[RunConfig], Dataset | None]) -> Dataset | None:
        if what not in self._read:
            try:
                found = load(self._config)
            except DataError as error:
                say(log, f"no {what} data", level=logging.ERROR, run=self._config.name, error=str(error))
                return None
            if found is None:
                return None
            self._read[what] = found
        return self._read[what]
