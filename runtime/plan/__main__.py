"""`python -m dslaunch.runtime.plan REQUEST`: rehearse a program as one rank; the launcher starts it.

REQUEST is a file of JSON: `program` (its words: a script and arguments) and `is_module`, or `model`, the
fields of a `ModelRequest`; `device` ("cuda" or "cpu"), `device_bytes`, `rank`, `world_size`, and the names of
files: `answer`, `stacks` (where the program is, written at the signal `stacks_signal`), `told` (what
rehearsals of other ranks have told, see stages.py) and `layers` (see scratch_files.py). The environment is
the rank's.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .scratch_files import enter

_PR_SET_PDEATHSIG = 1


def main(request: dict[str, Any]) -> None:
    """Rehearse, and write the answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed leaves nothing
    with open(request["told"]) as file:
        request["told"] = json.load(file)
    # the launcher's files, not those of the view
    with open(request["answer"], "w") as file, open(request["stacks"], "w") as stacks:
        faulthandler.register(request["stacks_signal"], file=stacks, all_threads=False)
        writes_files = enter(request["layers"])
        # With torch come threads, and the kernel gives a view of files to processes with one thread.
        from .answer import answer_of
        from .requested import rehearsed

        rehearsal = rehearsed(request, holds_files_back=not writes_files)
        json.dump({**answer_of(rehearsal), "writes_files": writes_files}, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the program would do at its end belongs to a run


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
