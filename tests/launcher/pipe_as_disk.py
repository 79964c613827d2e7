"""`python -m dslaunch`, to which a pipe may stand in for a log file.

Nothing else can be made as slow as a test wants it. A launcher refuses a pipe in the place of a file of its own, so this one
opens those that it finds there, and waits for their readers as for a disk.
"""

from __future__ import annotations

import os
import stat

from dslaunch.launcher import logs
from dslaunch.launcher.program import run

_open_plain = logs.open_plain


def _open(path: str, flags: int, mode: int = 0o600) -> int:
    if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return _open_plain(path, flags, mode)


if __name__ == "__main__":
    logs.open_plain = _open
    run()
