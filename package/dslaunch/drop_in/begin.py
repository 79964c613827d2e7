"""Reading of DSLAUNCH_DROP_IN when a Python starts: importing this module does it.

See "How a program finds it" in __init__.py.
"""

from __future__ import annotations

import os
import sys

from . import FOLDER, MODES, VARIABLE


def _begin() -> None:
    """Do what the variable asks for in this process; those that it starts do it for themselves.

    Errors: none; a mode that is none is named on stderr
    """
    mode = os.environ.get(VARIABLE, "never")
    if mode not in MODES:
        print(
            f"{VARIABLE}={mode!r}: must be one of {', '.join(MODES)}; it counts as never",
            file=sys.stderr,
            flush=True,
        )
    if mode == "auto" and FOLDER in sys.path:  # set by PYTHONPATH, or by `dslaunch drop-in install`
        return
    sys.path[:] = [one for one in sys.path if one != FOLDER]
    if mode in ("auto", "always"):
        sys.path.insert(len(sys.path) if mode == "auto" else 0, FOLDER)


_begin()  # once a process, however often Python reads the .pth file
