"""`python -m dslaunch.runtime.plan.in_scratch LAYERS COMMAND...`: run a command, and keep no file of it.

LAYERS is as in scratch_files.py. Where the kernel refuses the view, the command runs without it, and finds
the reason in DSLAUNCH_KEPT_FILES.
"""

from __future__ import annotations

import os
import sys

from ...shared import variables
from .scratch_files import enter


def main(layers: str, command: list[str]) -> None:
    """Become the command, which is in the view with all that it starts."""
    os.environ[variables.KEPT_FILES] = enter(layers)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
