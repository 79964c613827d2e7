"""Lines of results: one JSON object each, in what a step prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

# The environment variable with the second of time.monotonic() at which a step has to end.
END = "TESTS_GPU_END"


def tell(name: str, **figures: Any) -> None:
    """Print one, whole: other processes write to the same file."""
    sys.stdout.write(json.dumps({"name": name, **figures}) + "\n")
    sys.stdout.flush()


def found_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Return those that are among other text."""
    for line in lines:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def is_right(line: dict[str, Any]) -> bool:
    """What a peer cannot do is not our failure."""
    return bool(line.get("peer")) or (line.get("right", True) and "error" not in line)
