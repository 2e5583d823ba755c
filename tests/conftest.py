"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# An example that takes long says that the machine is busy, not that the code is wrong.
settings.register_profile("any-machine", deadline=None)
# For `make check`: a few examples of each property.
settings.register_profile("quick", parent=settings.get_profile("any-machine"), max_examples=15)
settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def no_log_outlives_its_test() -> Iterator[None]:
    """A command that ran within a test logs to that test's standard error, which is closed afterwards."""
    loggers = [logging.getLogger(), logging.getLogger("fedmpq.client")]
    before = [set(logger.handlers) for logger in loggers]
    yield
    for logger, known in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - known:
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)
