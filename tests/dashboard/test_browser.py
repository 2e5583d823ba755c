"""The dashboard in a real Chromium, of a real server with three boards, one of which is killed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fedmpq.dashboard.operator_token import token_file
from fedmpq.server.state_folder import StateFolder
from tests.chromium import page
from tests.federation.federation import Federation
from tests.waiting import until
from tools.browser import Page
from tools.programs import FEDMPQ

__all__ = ["page"]

FIRST_LOAD = 200_000
LOST = "board-2"
ROUNDS = 500
"""More than the test waits for: it aborts the run."""


def text(page: Page, selector: str) -> str:
    found: str = page.evaluate(f"document.querySelector({selector!r}).innerText")
    return found


def click(page: Page, words: str, within: str = "body") -> None:
    """The button that says so, once it can be pressed."""
    buttons = f"[...document.querySelectorAll({f'{within} button'!r})]"
    button = f"{buttons}.find(one => one.innerText === {words!r} && !one.disabled && one.offsetParent)"
    page.wait(f"Boolean({button})")
    page.evaluate(f"{button}.click()")


def status(federation: Federation) -> dict[str, Any]:
    words = [*FEDMPQ, "status", "--json", "--state", str(federation.state)]
    facts: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["run"]
    return facts


@pytest.mark.slow
def test_three_boards_one_of_them_killed(tmp_path: Path, page: Page) -> None:
    settings = {"rounds": ROUNDS, "away_seconds": 1, "deadline_seconds": 20, "quorum": 0.5}
    with Federation(tmp_path, [2, 4, 8], settings) as federation:
        server = federation.start_server("--dashboard", "0")
        said = server.log.read_text()
        url = next(word for word in said.split() if word.startswith("http://")).rstrip(";")
        page.resize(1200, 900)
        page.open(url)
        page.wait("document.querySelector('#run-state')?.innerText === 'waiting'")
        federation.start_boards()
        charts_are_drawn(page)
        assert page.bytes < FIRST_LOAD
        an_event_tells_of_the_board_that_is_killed(page, federation)
        it_is_used_with_the_keyboard(page)
        nothing_is_wider_than_a_small_screen(page)
        assert page.errors == []
        buttons_act(page, federation)
        a_lost_server_is_told(page, federation)
        the_log_names_who_came_and_who_was_missing(server.log.read_text())
        own = urlsplit(url).netloc
        assert {urlsplit(asked).netloc for asked in page.requests if not asked.startswith("data:")} == {own}


def charts_are_drawn(page: Page) -> None:
    """Every chart has its lines, bars and cells once a round is measured."""
    page.wait("document.querySelectorAll('#accuracy polyline.series').length === 4", 120)
    labels = page.evaluate("[...document.querySelectorAll('#accuracy .endlabel')].map(x => x.textContent)")
    assert sorted(labels) == ["2 bits", "4 bits", "8 bits", "mean"]
    page.wait("document.querySelectorAll('#bytes polyline.series').length === 2")
    page.wait("document.querySelectorAll('#seconds rect.bar').length >= 3")
    page.wait("document.querySelectorAll('#grid td.o-trained').length >= 3")
    page.wait("document.querySelectorAll('#widths tbody tr').length === 7")
    assert "less than FP32" in text(page, "#tiles")
    select = "document.querySelector('#board-select')"
    page.evaluate(f"{select}.value = 'board-0'; {select}.dispatchEvent(new Event('change'))")
    widths = "[...document.querySelectorAll('#widths td')].map(x => x.innerText)"
    assert set(page.evaluate(widths)) <= {"2", "·"}


def an_event_tells_of_the_board_that_is_killed(page: Page, federation: Federation) -> None:
    """Without a reload: it is away, then it came late, with the reason; the run goes on without it."""
    page.evaluate("window.notReloaded = true")
    federation.boards.pop(2).kill()
    rows = "[...document.querySelectorAll('#boards tbody tr')].map(x => x.innerText)"
    row = f"{rows}.find(x => x.includes({LOST!r}))"
    page.wait(f"/away/.test({row}) && / ago/.test({row})")
    page.wait("/2 of 3/.test(document.querySelector('#tiles').innerText)")
    before = page.evaluate("page.told.round")
    page.wait(f"page.told.round > {before} + 1")
    missing = "[...document.querySelectorAll('#grid td')].map(x => [x.title, x.className])"
    assert page.evaluate(f"{missing}.some(x => x[0].startsWith({LOST!r}) && x[1] !== 'o-trained')")
    assert page.evaluate("window.notReloaded")
    assert text(page, "#link") == "live"


def it_is_used_with_the_keyboard(page: Page) -> None:
    """A chart tells round by round what it shows; everything can be reached by the tabulator."""
    page.evaluate("document.querySelector('#accuracy .plot').focus()")
    page.press("ArrowLeft")
    page.wait("/^Round \\d/.test(document.querySelector('#accuracy .tip').innerText)")
    page.evaluate("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(4):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert reached == ["run-select", "unlock", "Pause", "Abort"]


def nothing_is_wider_than_a_small_screen(page: Page) -> None:
    """With many rounds too."""
    many = "Array.from({ length: 90 }, (_, i) => ({ ...page.told.rounds[0], round: i + 1 }))"
    page.evaluate(f"window.few = page.told.rounds; page.told.rounds = {many}; showRun()")
    for scheme in ("dark", "light"):
        page.prefer(scheme)
        page.resize(400, 800)
        page.wait("document.querySelector('#accuracy svg').clientWidth < 400")
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        page.wait("document.querySelectorAll('#grid tbody tr:first-child td').length >= 90")
    page.evaluate("page.told.rounds = window.few; showRun()")
    page.resize(1200, 900)


def buttons_act(page: Page, federation: Federation) -> None:
    """Not with a wrong token, and as the command would with the right one."""
    click(page, "Unlock buttons", "header")
    show_token(page, "fmo_" + "x" * 43)
    click(page, "Pause", "#deeds")
    page.wait("/not the operator/.test(document.querySelector('#said').innerText)")
    assert status(federation)["state"] == "running"
    # The browser itself writes down that it was refused.
    assert "401" in page.errors.pop()
    click(page, "Pause", "#deeds")
    show_token(page, token_file(StateFolder(federation.state)).read_text().strip())
    page.wait("document.querySelector('#run-state').innerText === 'paused'")
    assert status(federation)["state"] == "paused"
    page.evaluate("document.querySelector('#bundle-name').value = 'board-9'")
    click(page, "Make bundle", "#bundle-form")
    until((federation.state / "bundles" / "board-9" / "token").exists)
    click(page, "Resume", "#deeds")
    page.wait("document.querySelector('#run-state').innerText === 'running'")
    click(page, "Abort", "#deeds")
    click(page, "Abort the run", "#sure-dialog")
    page.wait("document.querySelector('#run-state').innerText === 'aborted'")
    assert page.errors == []


def show_token(page: Page, token: str) -> None:
    page.wait("document.querySelector('#token-dialog').open && document.activeElement.id === 'token-text'")
    page.type(token)
    click(page, "Unlock", "#token-dialog")
    page.wait("!document.querySelector('#token-dialog').open")


def a_lost_server_is_told(page: Page, federation: Federation) -> None:
    """What was known stays to be seen."""
    assert federation.server is not None
    federation.server.kill()
    page.wait("document.querySelector('#link').innerText === 'connection lost'")
    assert "trying again" in text(page, "#banner")
    assert page.evaluate("document.querySelectorAll('#accuracy polyline.series').length") == 4


def the_log_names_who_came_and_who_was_missing(log: str) -> None:
    for words in (
        "client enrolled client=board-0",
        "client connected client=board-1",
        "round opened run=parts round=1 clients=3 names=board-0,board-1,board-2",
        f"client disconnected client={LOST} reason=gone",
        "the operator asks: pause by=dashboard address=127.0.0.1",
    ):
        assert words in log, words
    # It was killed before it had answered, or after: then the next round is without it.
    assert f"missing={LOST}" in log or "clients=2 names=board-0,board-1" in log
