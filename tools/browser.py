"""A headless Chromium, driven over its DevTools protocol: pages opened, looked at, clicked and photographed.

Debian's package `chromium` is what it starts, or a browser of that family that FEDMPQ_CHROMIUM names. What
a page logs, asks for and fails at is written down, so that a test can say that there was nothing of the kind.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

SETTING = "FEDMPQ_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0
DRAWN = "document.querySelector('#accuracy .drawn')?.childElementCount > 0"
"""Of the dashboard's page: whether a run is shown."""
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    # What the browser asks of its maker by itself is not the page's doing, and is not wanted.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    # Certificates of the server's own authority, which no browser knows.
    "--ignore-certificate-errors",
)


class NoBrowser(RuntimeError):
    """Why none can be started here."""


class BrowserError(RuntimeError):
    """A page that did not come to what was waited for."""


def find_browser() -> Path | None:
    """The browser there is; None: none."""
    if (named := os.environ.get(SETTING)) is not None:
        return Path(named)
    found = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    return None if found is None else Path(found)


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket = socket
        self._session = session
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        """What was logged as an error, or thrown and not caught."""
        self.requests: list[str] = []
        """The address of everything that was asked for."""
        self.bytes = 0
        """Of the answers so far, as they crossed the network."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        """Until the expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText")
                raise BrowserError(f"{script} is still {value!r}; errors: {self.errors}; the page: {text}")
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """A key such as "Tab" or "Enter", or a letter."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}.get(key, 0)
        facts: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **facts, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """The page as a PNG; `whole`: also what is below the window's edge."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, "sessionId": self._session}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") != number:
                self._note(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _note(self, event: dict[str, Any]) -> None:
        facts = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(facts["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if facts["type"] in ("error", "assert", "warning"):
                self.errors.append(json.dumps(facts["args"]))
            case "Log.entryAdded" if facts["entry"]["level"] == "error":
                self.errors.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            case "Network.dataReceived":
                self.bytes += facts["encodedDataLength"]


@contextmanager
def open_page() -> Iterator[Page]:
    """A tab of a browser of its own, which ends with the block."""
    path = find_browser()
    if path is None:
        raise NoBrowser(f"no Chromium found; install Debian's package chromium, or name one in {SETTING}")
    with tempfile.TemporaryDirectory(prefix="fedmpq-browser-", ignore_cleanup_errors=True) as folder:
        flags = [*_FLAGS, f"--user-data-dir={folder}"]
        if os.geteuid() == 0:
            # Its sandbox does not start for root.
            flags.append("--no-sandbox")
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen([path, *flags, "about:blank"], stdout=output, stderr=output)
        try:
            with connect(_address(process, Path(folder), log), max_size=None) as socket:
                yield _tab(socket)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
    """Of the browser's DevTools, which it writes into its folder once it listens."""
    file, end = folder / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not (lines := file.read_text().splitlines() if file.exists() else [])[1:]:
        if process.poll() is not None or time.monotonic() > end:
            raise NoBrowser(f"Chromium did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


def _tab(socket: ClientConnection) -> Page:
    def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        socket.send(json.dumps({"id": -number, "method": method, "params": parameters}))
        while (answer := json.loads(socket.recv(timeout=PATIENCE))).get("id") != -number:
            pass
        result: dict[str, Any] = answer["result"]
        return result

    target = call(1, "Target.createTarget", url="about:blank")["targetId"]
    session = call(2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return Page(socket, session)


def photograph(url: str, path: Path, *, width: int = 1200, scheme: str = "light", scale: float = 1.0) -> None:
    """A dashboard once it has drawn a run, whole."""
    with open_page() as page:
        page.resize(width, 900, scale)
        page.prefer(scheme)
        page.open(url)
        page.wait(DRAWN)
        page.picture(path)


if __name__ == "__main__":
    photograph(sys.argv[1], Path(sys.argv[2]))
