"""`python -m dslaunch.runtime.numerics REQUEST`: compare two recordings, and print the result.

REQUEST is JSON: the folder, and which run is the reference. The exit code is 0 if they are equal within
bounds, 1 if they differ, 2 if a recording cannot be read.
"""

from __future__ import annotations

import signal

# Ctrl-C ends this process without a traceback of whatever it is loading: it has nothing to clean up, and
# `dslaunch numerics` says that it was interrupted.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import sys

from .compare import compare
from .report import lines_of


def main() -> int:
    """Return the exit code."""
    request = json.loads(sys.argv[1])
    try:
        result = compare(request["folder"], request["reference"])
    except (OSError, ValueError, KeyError) as error:
        print(f"dslaunch: numerics: {error}", file=sys.stderr)
        return 2
    for line in lines_of(result, request["reference"]):
        print(line)
    return 0 if result.difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
