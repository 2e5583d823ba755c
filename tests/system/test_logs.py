"""Lines of a log: the server's events, the client's sentences, and both as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

EVENTS = """
import logging
from fedmpq.system.logs import log_events, say
log_events("FORMAT")
log = logging.getLogger("fedmpq.server")
say(log, "round merged", round=3, loss=0.123456, why=None, by={"2": 0.5}, words="two words", none="")
logging.getLogger("alembic").info("of a library")
say(log, "a bug", level=logging.ERROR)
"""
SENTENCES = """
import logging
from fedmpq.system.logs import log_sentences, with_facts
log = logging.getLogger("fedmpq.client")
log_sentences(log, "FORMAT")
log_sentences(log, "FORMAT")
log.info("round %d: loss %.2f", 3, 0.5, extra=with_facts({"round": 3, "loss": 0.5}))
logging.getLogger("grpc").info("of a library")
log.warning("no connection")
log.debug("not of interest")
"""

UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def lines_of(script: str, form: str) -> list[str]:
    command = [sys.executable, "-c", script.replace("FORMAT", form)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def objects_of(script: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(script, "json")]


def test_events_as_text() -> None:
    merged, bug = (line.split(" ", 2)[2] for line in lines_of(EVENTS, "text"))
    assert merged == 'INFO round merged round=3 loss=0.1235 by=2:0.5 words="two words" none=""'
    assert bug == "ERROR a bug"


def test_sentences_as_text() -> None:
    info, warning = (line.split(" ", 1)[1] for line in lines_of(SENTENCES, "text"))
    assert info == "round 3: loss 0.50"
    assert warning == "warning: no connection"


@pytest.mark.parametrize(
    ("script", "headline", "expected"),
    [
        (
            EVENTS,
            "event",
            [
                (
                    "info",
                    "round merged",
                    {"round": 3, "loss": 0.123456, "by": {"2": 0.5}, "words": "two words", "none": ""},
                ),
                ("error", "a bug", {}),
            ],
        ),
        (
            SENTENCES,
            "message",
            [("info", "round 3: loss 0.50", {"round": 3, "loss": 0.5}), ("warning", "no connection", {})],
        ),
    ],
)
def test_as_json(script: str, headline: str, expected: list[tuple[str, str, dict[str, Any]]]) -> None:
    found = []
    for line in objects_of(script):
        assert UTC.fullmatch(line.pop("time"))
        found.append((line.pop("level"), line.pop(headline), line))
    assert found == expected


def test_an_exception_is_told_whole() -> None:
    script = EVENTS + "\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('broken')\n"
    assert "ZeroDivisionError: division by zero" in objects_of(script)[-1]["traceback"]
    assert lines_of(script, "text")[-1] == "ZeroDivisionError: division by zero"
