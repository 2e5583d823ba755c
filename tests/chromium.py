"""A real browser for the tests: Debian's `chromium` where it is installed.

FEDMPQ_TEST_CHROMIUM=required fails where there is none, instead of skipping.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tools.browser import NoBrowser, Page, find_browser, open_page

SETTING = "FEDMPQ_TEST_CHROMIUM"
REQUIRED = "required"


@pytest.fixture
def page() -> Iterator[Page]:
    """A tab that sees nothing but what the test opens."""
    if find_browser() is None and os.environ.get(SETTING) != REQUIRED:
        pytest.skip(f"no Chromium is installed; {SETTING}={REQUIRED} makes this a failure")
    try:
        with open_page() as opened:
            yield opened
    except NoBrowser as error:
        pytest.fail(str(error))
