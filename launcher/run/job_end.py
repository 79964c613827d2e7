"""Reports that the job has ended: to a command of the user, and to an address on the web.

Neither changes the job's exit code, and neither is waited for longer than its time.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from ..options.end import EndOptions, shown_url
from ..wording import cleaned

COMMAND_S = 30.0
WEBHOOK_TRY_S = 10.0
WEBHOOK_S = 25.0  # with both tries, and the lookup of the address
WEBHOOK_PAUSE_S = 1.0
NUM_TRIES = 2
MAX_OUTPUT_BYTES = 2000
_OUTPUT_S = 0.5  # for the rest of the output, once the command has ended
_LOOK_S = 0.02
_GIVING_UP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def tell_end(end: EndOptions, event: Mapping[str, Any], *, warn: Callable[[str], None]) -> None:
    """Give both the event; failures are reported to `warn`. A signal that ends programs gives up both."""
    data = json.dumps(event).encode("ascii") + b"\n"
    parts: list[_Command | _Webhook] = []
    if end.webhook is not None:
        parts.append(_Webhook(end.webhook, data))
    if end.command is not None:
        parts.append(_Command(end.command, data, _variables(event)))
    given_up_by = 0

    def give_up(number: int, _: FrameType | None) -> None:
        nonlocal given_up_by
        given_up_by = number

    before = {
        number: signal.signal(number, give_up)
        for number in _GIVING_UP
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for part in parts:
            part.start()
        while not given_up_by and any(part.is_going_on() for part in parts):
            time.sleep(_LOOK_S)
        for part in parts:
            if problem := part.end(given_up_by):
                warn(problem)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _variables(event: Mapping[str, Any]) -> dict[str, str]:
    return {
        "DSLAUNCH_JOB_NAME": cleaned(str(event["name"])),
        "DSLAUNCH_EXIT_CODE": str(event["exit_code"]),
        "DSLAUNCH_DURATION_S": f"{event['duration_s']:.0f}",
        "DSLAUNCH_LOG_FOLDER": event["log_folder"] or "",
    }


class _Command:
    """One run of --on_end. Its output is kept in case it fails."""

    def __init__(self, command: str, data: bytes, variables: Mapping[str, str]) -> None:
        self._command, self._data, self._variables = command, data, variables
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        self._until = 0.0
        self._printed = b""
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._until = time.monotonic() + COMMAND_S
        given = os.memfd_create("end")  # not a pipe: a command need not read it
        try:
            os.write(given, self._data)
            os.lseek(given, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**os.environ, **self._variables},
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who end it
            )
            self._reader.start()
        except (OSError, ValueError) as error:
            self._problem = f"it cannot be run: {getattr(error, 'strerror', None) or error}"
        finally:
            os.close(given)

    def is_going_on(self) -> bool:
        return self._process is not None and self._process.poll() is None and time.monotonic() < self._until

    def end(self, given_up_by: int) -> str:
        """Kill the command if it has not ended; return what went wrong."""
        if self._process is None:
            return f"--on_end: {self._problem}"
        code = self._process.poll()
        if code is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            name = signal.Signals(given_up_by).name if given_up_by else ""
            why = f"given up by {name}" if name else f"ended after {COMMAND_S:g} s, its time"
            return f"--on_end: {why}{self._shown()}"
        if code == 0:
            return ""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"--on_end: {how}{self._shown()}"

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        with self._process.stdout as out:
            while data := os.read(out.fileno(), 1 << 16):
                self._printed = (self._printed + data)[-MAX_OUTPUT_BYTES:]

    def _shown(self) -> str:
        self._reader.join(_OUTPUT_S)
        text = cleaned(self._printed.decode("utf-8", "replace").strip())
        return f"; it printed: {text}" if text else ""


class _Webhook:
    """One message to --webhook, with another try if the first one fails."""

    def __init__(self, url: str, data: bytes) -> None:
        self._url, self._data = url, data
        self._until = 0.0
        self._problem = ""
        self._thread = threading.Thread(target=self._send, daemon=True)

    def start(self) -> None:
        self._until = time.monotonic() + WEBHOOK_S
        self._thread.start()

    def is_going_on(self) -> bool:
        return self._thread.is_alive() and time.monotonic() < self._until

    def end(self, given_up_by: int) -> str:
        """Return what went wrong, without secrets of the URL."""
        problem = self._problem
        if self._thread.is_alive():
            problem = problem or f"no answer within {WEBHOOK_S:g} s"
            if given_up_by:
                problem = f"given up by {signal.Signals(given_up_by).name}"
        return f"--webhook: {shown_url(self._url)}: {problem}" if problem else ""

    def _send(self) -> None:
        for number in range(NUM_TRIES):
            if number:
                time.sleep(WEBHOOK_PAUSE_S)
            self._problem, may_help = _post(self._url, self._data)
            if not may_help:
                return


def _post(url: str, data: bytes) -> tuple[str, bool]:
    """Try once: return what went wrong, if anything did, and whether another try may help."""
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    from ... import __version__

    class Refusing(urllib.request.HTTPRedirectHandler):
        """Refuse: a message that is redirected would become a question."""

        def redirect_request(self, *_: object) -> None:
            return None

    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    headers = {"Content-Type": "application/json", "User-Agent": f"dslaunch/{__version__}"}
    if "@" in parts.netloc:
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    plain = urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))
    try:
        request = urllib.request.Request(plain, data=data, headers=headers, method="POST")
        with urllib.request.build_opener(Refusing).open(request, timeout=WEBHOOK_TRY_S):
            return "", False
    except urllib.error.HTTPError as error:
        error.close()
        return f"it answered {error.code}", error.code >= 500 or error.code == 429
    except ConnectionError:
        return "it closed the connection without an answer", True
    except HTTPException:
        return "its answer is not HTTP", True
    except TimeoutError:
        return f"no answer within {WEBHOOK_TRY_S:g} s", True
    except urllib.error.URLError as error:
        why = error.reason
        shown = why.strerror if isinstance(why, OSError) and why.strerror else type(why).__name__
        return cleaned(shown), True
    except (OSError, ValueError) as error:  # its text may have the URL
        return type(error).__name__, True
