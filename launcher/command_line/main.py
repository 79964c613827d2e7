"""The program `dslaunch`: tasks before and after the command that only a process of its own may do.

The process imports this module first, so that Ctrl-C is handled from the first moment.
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


# Leave SIGINT alone if it is ignored, as after `&` in a script.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _end_at_once)

import atexit  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402

# Loaded modules stay in memory; repeated searches of them for garbage took a tenth of a start.
GARBAGE_THRESHOLD = 50_000


def run() -> NoReturn:
    """Run the command, and then end the process without the interpreter's slow shutdown.

    A thread of a connection that was given up may still be inside a library; in a normal shutdown that
    crashed a job that had ended well.
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
    except KeyboardInterrupt:  # Ctrl-C just before main() handles it
        _end_at_once()
    atexit._run_exitfuncs()  # handlers that libraries registered with atexit
    for stream in (sys.stdout, sys.stderr):
        # The stream is closed, or never existed
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if isinstance(code, str):
        os.write(2, f"{code}\n".encode())
    os._exit(code if isinstance(code, int) else int(code is not None))
