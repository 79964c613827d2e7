"""`python -m dslaunch`, to which a pipe may stand in for a log file.

Nothing else can be made as slow as a test wants it. A launcher refuses a pipe in the place of a file of its
own, so this one opens those that it finds there, and waits for their readers as for a disk.
"""

from __future__ import annotations

import os
import stat

from dslaunch.launcher.command_line.main import run
from dslaunch.launcher.output import log_files

_open_plain = log_files.open_plain


def _open(path: str, flags: int, mode: int = 0o600) -> int:
    if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return _open_plain(path, flags, mode)


if __name__ == "__main__":
    log_files.open_plain = _open
    run()
