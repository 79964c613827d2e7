"""The program `dslaunch`: tasks before and after the command that only a process of its own may do.

The process imports this first, so Ctrl-C is answered from here on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` is made of, which takes a millisecond to import
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_INTERRUPTED = 130


def _end_at_once(number: int = 0, frame: object = None) -> NoReturn:
    """End the process with a short message: while it loads its modules there is nothing to clean up."""
    try:
        os.write(2, b"dslaunch: interrupted: nothing was started\n")
    finally:
        os._exit(_INTERRUPTED)


# Unless it is ignored, as after `&` in a script.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end_at_once)

import atexit  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402

# Loaded modules stay, and searching them for garbage again and again took a tenth of a start.
GARBAGE_THRESHOLD = 50_000


def run() -> NoReturn:
    """Run the command, and then skip the slow walk through the interpreter's end.

    A thread of a connection that was given up may be inside a library then, which crashed a job that had
    ended well.
    """
    gc.set_threshold(GARBAGE_THRESHOLD)
    code: int | str | None = 1
    try:
        if sys.platform != "linux":
            sys.exit(
                f"dslaunch: it runs on Linux, and this is {sys.platform}; start jobs from a Linux machine"
            )
        from .cli import VARIABLE, main

        if _signal.getsignal(_signal.SIGINT) is _end_at_once:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        if VARIABLE in os.environ:
            from .completer import answer

            answer(os.environ[VARIABLE])
            sys.exit(0)
        main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # just before `main` deals with them
        _end_at_once()
    atexit._run_exitfuncs()  # handlers that libraries have left for the end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    if isinstance(code, str):
        os.write(2, f"{code}\n".encode())
    os._exit(code if isinstance(code, int) else int(code is not None))
