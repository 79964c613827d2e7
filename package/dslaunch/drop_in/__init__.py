"""`import deepspeed` gets dslaunch: for programs that were written for DeepSpeed.

How a program finds it
----------------------
The folder `path/` holds a thin package `deepspeed` and its metadata, so that both the import and a question
for the installed version find it, in child processes too. `dslaunch` has its workers look there: the variable
DSLAUNCH_DROP_IN goes with the job, and each worker's Python reads it at its start (begin.py, by way of
dslaunch_drop_in.pth, which is installed beside the package), because only that Python knows where its
packages are. "auto" looks there last, so that a DeepSpeed that is installed wins; "always" first; "never" not
at all. Under other launchers set the variable, or PYTHONPATH to what `python -m dslaunch.drop_in` prints.
`dslaunch drop-in install` does it for all programs of an environment (installation.py). `bin/` holds
DeepSpeed's commands, for PATH.
"""

from __future__ import annotations

import os

VARIABLE = "DSLAUNCH_DROP_IN"
PYTHON_VARIABLE = "DSLAUNCH_PYTHON"
"""Path of the Python that the commands in `bin/` take.

Without it, the Python of the environment in which they are, or python3.
"""
MODES = ("auto", "always", "never")
VERSION = "0.19.8+dslaunch"
"""Value of `deepspeed.__version__`: the level of DeepSpeed that programs may expect, and whose it is."""

_HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(_HERE, "path")
BIN = os.path.join(_HERE, "bin")
