"""Who may ask what of the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from fedmpq.dashboard.guard import Rules
from fedmpq.dashboard.operator_token import (
    TokenFileError,
    is_shown,
    operator_token,
    token_file,
)
from fedmpq.server.state_folder import StateFolder

TOKEN = "fmo_" + "a" * 43
OTHER = "fmo_" + "b" * 43
OURS = "http://localhost:8480"


def refused(rules: Rules, method: str = "GET", path: str = "/api/state", **headers: str) -> int | None:
    """The status it is refused with; None: it goes through. Header names have "_" for "-"."""
    named = {name.replace("_", "-"): value for name, value in {"host": "127.0.0.1:8480", **headers}.items()}
    refusal = rules.refusal(method, path, "http", Headers(named))
    return None if refusal is None else refusal[0]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8480", "127.0.0.1.evil.example", "", "[", "10.0.0.1:8480", "localhost."],
)
def test_another_name_for_this_machine_is_refused(host: str) -> None:
    assert refused(Rules.on_loopback(None), host=host) == 421
    assert refused(Rules.on_loopback(None), path="/", host=host) == 421


@pytest.mark.parametrize("host", ["localhost:8480", "LOCALHOST", "127.0.0.1", "[::1]:8480"])
def test_this_machine_is_known_by_its_names(host: str) -> None:
    assert refused(Rules.on_loopback(None), host=host) is None


def test_beyond_loopback_the_certificates_names_hold_and_facts_need_the_token() -> None:
    rules = Rules.beyond(["FL.example.org"], TOKEN)
    assert refused(rules, path="/", host="fl.example.org:8480") is None
    assert refused(rules, host="fl.example.org:8480") == 401
    assert refused(rules, host="fl.example.org:8480", authorization=f"Bearer {TOKEN}") is None
    assert refused(rules, host="fl.example.net:8480", authorization=f"Bearer {TOKEN}") == 421


def test_a_dashboard_that_only_shows_has_no_buttons() -> None:
    rules = Rules.on_loopback(None)
    assert refused(rules, "POST", authorization=f"Bearer {TOKEN}") == 403
    assert refused(rules, "POST") == 403


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]),
    path=st.sampled_from(["/", "/dashboard.js", "/api/state", "/api/operator/pause"]),
    host=st.sampled_from(["localhost:8480", "evil.example"]),
    origin=st.sampled_from(
        [None, "http://localhost:8480", "https://localhost:8480", "http://evil.example", "null"]
    ),
    site=st.sampled_from([None, "same-origin", "none", "same-site", "cross-site"]),
    shown=st.sampled_from([None, f"Bearer {TOKEN}", f"Bearer {OTHER}", TOKEN, "Basic x", "Bearer "]),
    closed=st.booleans(),
)
def test_the_rules_are_those_of_the_page_in_docs(
    method: str, path: str, host: str, origin: str | None, site: str | None, shown: str | None, closed: bool
) -> None:
    """Against the rules spelt out one by one."""
    rules = Rules.beyond([], TOKEN) if closed else Rules.on_loopback(TOKEN)
    headers = {"host": host, "origin": origin, "sec_fetch_site": site, "authorization": shown}
    status = refused(
        rules, method, path, **{name: value for name, value in headers.items() if value is not None}
    )
    ours = host == "localhost:8480" and origin in (None, OURS)
    ours = ours and (site in (None, "same-origin", "none") or not path.startswith("/api/"))
    knows = shown == f"Bearer {TOKEN}"
    changes, tells = method == "POST", path.startswith("/api/") and closed
    known = method in ("GET", "HEAD", "POST")
    assert (status is None) == (ours and known and (knows or not (changes or tells)))


@given(st.text("fmo_abBearer ", max_size=60))
def test_no_other_text_is_the_token(text: str) -> None:
    assert not is_shown(text, TOKEN)
    assert is_shown(f"Bearer {TOKEN}", TOKEN)
    assert not is_shown(f"Bearer {text}", TOKEN)


def test_the_token_stays_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    token = operator_token(state)
    assert token.startswith("fmo_")
    assert operator_token(state) == token
    assert token_file(state).stat().st_mode & 0o777 == 0o600
    token_file(state).write_text("short\n")
    with pytest.raises(TokenFileError, match="delete it"):
        operator_token(state)
