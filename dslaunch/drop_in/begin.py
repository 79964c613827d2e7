"""What a Python that starts does about DSLAUNCH_DROP_IN: importing this does it. See "How a program finds it"."""

from __future__ import annotations

import os
import sys

from . import BIN, FOLDER, MODES, PYTHON_VARIABLE, VARIABLE


def _begin() -> None:
    """Do what the variable asks for, in this process and for those that it starts.

    Errors: none; a mode that is none is named on stderr
    """
    mode = os.environ.get(VARIABLE, "never")
    if mode not in MODES:
        print(
            f"{VARIABLE}={mode!r}: must be one of {', '.join(MODES)}; it counts as never",
            file=sys.stderr,
            flush=True,
        )
    if mode not in ("auto", "always"):
        return
    programs = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for places, one in ((sys.path, FOLDER), (programs, BIN)):
        if one not in places:
            places.insert(len(places) if mode == "auto" else 0, one)
    os.environ["PATH"] = os.pathsep.join(programs)
    os.environ[PYTHON_VARIABLE] = sys.executable


_begin()  # once a process, however often Python reads the .pth file
