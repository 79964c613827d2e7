"""How threads that write checkpoints share the processor with training."""

from __future__ import annotations

import os
import threading

# while files are written: a seventieth of a core where others want it, all of it otherwise
_NICENESS = 19


def yield_to_training() -> None:
    """Let this thread, and those that it starts, have the processor when training does not want it."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, _NICENESS))
