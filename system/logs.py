"""Structured logs on standard error: an event and its facts, for people as text or for machines as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]


def configure(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Send everything the server logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def say(log: logging.Logger, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with its facts; a fact that is None is left out."""
    known = {name: value for name, value in facts.items() if value is not None}
    log.log(level, event, extra={"facts": known})


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


class _Text(logging.Formatter):
    """`2026-01-31 12:00:00 INFO round merged round=3 updates=4`"""

    default_msec_format = ""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        line = f"{self.formatTime(record)} {record.levelname} {record.getMessage()}{facts}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    """One object a line: time, level, event, and the facts beside them."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_facts(record),
        }
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
