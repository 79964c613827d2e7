"""The last line of a process that has nothing else to show."""

from __future__ import annotations

import os
import sys
import textwrap
from shutil import get_terminal_size


def tell(message: str) -> None:
    """Print one line to stderr. Where that is closed or full, the exit code alone says how it ended."""
    if sys.stderr is None:
        return
    line = f"dslaunch: {message}"
    if sys.stderr.isatty():  # like the launcher: the terminal would break words
        width = get_terminal_size().columns
        line = textwrap.fill(
            line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # the end of the process would try to write it once more, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
