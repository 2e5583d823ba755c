"""A real browser for the tests: Debian's `chromium` where it is installed.

FEDMPQ_TEST_CHROMIUM says what is done where it is not; by default the tests are skipped.

    wanted      install Debian's package, if that can be done here, and else skip
    required    install it, and fail where that cannot be done
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.browser import NoBrowser, Page, find_browser, open_page

SETTING = "FEDMPQ_TEST_CHROMIUM"
WANTED, REQUIRED = "wanted", "required"
INSTALL_SECONDS = 600.0
PACKAGES = ("chromium", "fonts-dejavu-core")


@pytest.fixture
def page() -> Iterator[Page]:
    """A tab that sees nothing but what the test opens."""
    setting = os.environ.get(SETTING)
    if find_browser() is None:
        reason = f"{SETTING} is not set" if setting is None else install()
        if find_browser() is None and setting != REQUIRED:
            pytest.skip(f"no Chromium is installed: {reason}")
    try:
        with open_page() as opened:
            yield opened
    except NoBrowser as error:
        pytest.fail(str(error))


def install() -> str:
    """Debian's package, if its tools are here; else why not."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "apt-get is not here, or not allowed to install: apt-get install chromium"
    with (Path(tempfile.gettempdir()) / "fedmpq-chromium.lock").open("w") as turn:
        # Tests run side by side, and the second finds it installed.
        fcntl.flock(turn, fcntl.LOCK_EX)
        if find_browser() is not None:
            return ""
        for words in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
            try:
                done = subprocess.run(
                    ["apt-get", *words], capture_output=True, text=True, timeout=INSTALL_SECONDS
                )
            except subprocess.TimeoutExpired:
                return f"apt-get {words[0]} took too long"
            if done.returncode:
                return f"apt-get {words[0]}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
    return ""
