"""The events of a file, one by one, whatever is in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..node.plain_file import open_plain

MAX_LINE_BYTES = 32 << 20  # the longest that dslaunch writes is a report of 1 MiB, in JSON
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventLines:
    """Reads files of events. `num_bad` lines are no events, `is_cut` says whether the last one has no end."""

    def __init__(self) -> None:
        self.num_bad = 0
        self.is_cut = False
        self.num_events = 0

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """Each event that can be read.

        Errors: LaunchError if the file cannot be opened or read
        """
        try:
            with open(open_plain(str(path), 0), "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
                    while not is_whole and line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    event = _event(line) if is_whole else None
                    if event is not None:
                        self.num_events += 1
                        yield event
                    elif is_whole and not line.endswith(b"\n"):
                        self.is_cut = True
                    else:
                        self.num_bad += bool(line.strip()) or not is_whole
        except OSError as error:
            raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return None
    return found


def number(value: object) -> float | None:
    """A number of an event, where NaN and infinity are words; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return _WORDS.get(value) if isinstance(value, str) else None


def whole(value: object, default: int = -1) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
