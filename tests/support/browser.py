"""A headless Chromium, told what to do over its own pipe: pages are opened, asked, and photographed.

The DevTools protocol over `--remote-debugging-pipe`: JSON messages that end with NUL, on descriptors
3 and 4. No driver and no library are needed.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msd_daemon.descriptors import is_readable

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0


def needs_browser() -> str:
    """Return why no page can be looked at; empty where one can."""
    if any(map(shutil.which, NAMES)):
        return ""
    return "no Chromium is installed here (apt-get install chromium)"


class Page:
    """One page of a browser."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the page said on the console as errors, and what it threw."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to an address."""
        answer = self._call("Page.navigate", url=address)
        assert "errorText" not in answer, answer

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        # What is not there yet throws.
        tried = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        while not self.value(tried):
            assert time.monotonic() < deadline, (
                f"waited for {expression}: {self.value('document.body?.innerText')}\n{self.complaints}"
            )
            time.sleep(0.05)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Be a window of a size, of a reader who likes it dark or light."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(json.dumps(params["entry"])[:2000])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert is_readable(self._read_fd, ANSWER_S), "the browser is silent"
            data = os.read(self._read_fd, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own and give its page; it ends with the block."""
    program = next(filter(None, map(shutil.which, NAMES)))
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # It reads orders from descriptor 3 and answers on 4.
    command = [
        "bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}', program,
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            pass_fds=(to_read, from_write),
        )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        os.close(to_write)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(from_read)
