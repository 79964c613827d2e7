"""The program `dslaunch`: what only a process of its own may do before and after the command."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from typing import NoReturn

# What is loaded stays, and is too much to be searched for garbage again and again meanwhile: that took a tenth of a start.
GARBAGE_THRESHOLD = 50_000


def run() -> NoReturn:
    """Run the command, and then take no slow walk through the interpreter's end.

    A thread of a connection that was given up may be inside a library then, which crashed a job that had ended well.
    """
    gc.set_threshold(GARBAGE_THRESHOLD)
    code: int | str | None = 1
    try:
        from .cli import main  # here: it loads much

        main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # while it was loaded; `main` deals with those that come later
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write("dslaunch: interrupted: nothing was started\n")
        code = 130
    atexit._run_exitfuncs()  # pdsh, if it still runs
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)
