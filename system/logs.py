"""Structured logs on standard error: a headline and its facts, for people as text or for machines as JSON.

The server's headlines are events with their facts beside them: `round merged round=3 updates=4`. The client's
are sentences that hold their facts: `round 3: epoch 1 of 2: loss 0.31, accuracy 90.1 %`. As JSON both are one
object a line: the time, the level, the headline and the facts.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_TALKATIVE = ("alembic", "botocore", "aiobotocore")
"""Libraries that tell of each step of theirs."""


def log_events(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Sends all that this process logs to standard error, as events."""
    formatter = _Json("event") if log_format == "json" else _EventText()
    logging.basicConfig(level=level, handlers=[_stderr(formatter)], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def log_sentences(log: logging.Logger, log_format: LogFormat) -> None:
    """Sends what this logger is told to standard error, as sentences; what libraries log is left out."""
    log.handlers[:] = [_stderr(_Json("message") if log_format == "json" else _SentenceText())]
    log.setLevel(logging.INFO)


def say(log: logging.Logger, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Logs an event with its facts; a fact that is None is left out."""
    known = {name: value for name, value in facts.items() if value is not None}
    log.log(level, event, extra=with_facts(known))


def with_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of a logger takes as `extra`, so that the facts of its sentence stand in the JSON too."""
    return {"facts": dict(facts)}


def _stderr(formatter: logging.Formatter) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _utc(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _EventText(logging.Formatter):
    """`2026-01-31 12:00:00 INFO round merged round=3 updates=4`"""

    default_msec_format = ""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        line = f"{self.formatTime(record)} {record.levelname} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _SentenceText(logging.Formatter):
    """`2026-01-31T12:00:00.000Z warning: the upload broke off`; the level of ordinary lines is left out."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{_utc(record)} {level}{record.getMessage()}"


class _Json(logging.Formatter):
    """One object a line: time, level, the headline under the key `headline`, and the facts beside them."""

    def __init__(self, headline: str) -> None:
        super().__init__()
        self._headline = headline

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _utc(record), "level": record.levelname.lower(), self._headline: record.getMessage()}
        line = head | _facts(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{_word(one)}" for name, one in value.items()) or "-"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
