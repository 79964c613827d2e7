"""A headless Chromium that opens pages: its DevTools protocol over two pipes, without a client library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
END = b"\0"  # of a message
LIMIT_S = 60.0
BETWEEN_PAGES = "Inspected target navigated"
PAUSE_S = 0.1  # between two looks at a page


def find_browser() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser with a profile of its own in `folder`.

    State: `requested` has each address that was asked for so far, `errors` what went wrong in a page:
    exceptions, console.error(), and what the browser refused.
    """

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads fd 3 and writes fd 4, which a shell gives it.
        command = (
            'exec "$0" --headless --no-sandbox --disable-gpu --remote-debugging-pipe '
            f'"--user-data-dir={folder}" about:blank 3<&{to_browser} 4>&{from_browser}'
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, program],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._number = 0
        self._session = ""
        self.requested: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Network.enable")
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Errors: AssertionError if the browser answers with an error, or not at all"""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + END)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            answer = self._next_message()
            self._note(answer.get("method", ""), answer.get("params", {}))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"{method}: no answer in {LIMIT_S} s")

    def _note(self, method: str, params: dict[str, Any]) -> None:
        """What the browser tells without being asked."""
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))

    def _next_message(self) -> dict[str, Any]:
        while END not in self._unread:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise AssertionError("the browser has ended")
            self._unread += data
        message, _, self._unread = self._unread.partition(END)
        read: dict[str, Any] = json.loads(message)
        return read

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Units: CSS pixels"""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def open(self, address: str) -> None:
        """Load the address, and wait until the page is there with all that belongs to it."""
        self.call("Page.navigate", url=address)
        self.wait_for(
            f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'"
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Its value, as soon as it is true; while a page gives way to the next one there is none."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := self._ask_if_there(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true in {LIMIT_S} s: {expression}")
            time.sleep(PAUSE_S)
        return value

    def _ask_if_there(self, expression: str) -> Any:
        try:
            return self.ask(expression)
        except AssertionError as error:
            if BETWEEN_PAGES in str(error):
                return None
            raise

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
