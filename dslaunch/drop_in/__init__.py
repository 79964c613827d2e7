"""`import deepspeed` gets dslaunch: for programs that were written for DeepSpeed.

How a program finds it
----------------------
The folder `path/` holds a thin package `deepspeed` and its metadata, so that both the import and a question for the
installed version find it, in child processes too. `dslaunch` has its workers look there: the variable DSLAUNCH_DROP_IN
goes with the job, and each worker's Python reads it at its start (dslaunch_drop_in.pth, which is installed beside the
package), because only that Python knows where its packages are. "auto" looks there last, so that a DeepSpeed that is
installed wins; "always" first; "never" not at all. Under other launchers set the variable, or PYTHONPATH to
what `python -m dslaunch.drop_in` prints.
`bin/` holds DeepSpeed's commands and goes to PATH in the same way.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "DSLAUNCH_DROP_IN"
MODES = ("auto", "always", "never")
VERSION = "0.19.8+dslaunch"
"""What `deepspeed.__version__` says: the level of DeepSpeed that programs may expect, and whose it is."""

_HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(_HERE, "path")
BIN = os.path.join(_HERE, "bin")


def begin() -> None:
    """Do what the variable asks for, in this process and for those that it starts. Called at Python's start.

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
