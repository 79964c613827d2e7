"""What this process says at its end when it has nothing else to show."""

from __future__ import annotations

import os
import sys


def tell(message: str) -> None:
    """Print one line to stderr. Where that is closed or full, the exit code alone says how it ended."""
    if sys.stderr is None:
        return
    try:
        print(f"dslaunch: {message}", file=sys.stderr, flush=True)
    except OSError:  # the end of the process would try to write it once more, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
