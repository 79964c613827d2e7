"""What may stand in the place of a file without being one."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("link", "pipe", "folder")


def put_no_file(kind: str, path: Path, *, linked: Path) -> None:
    """Make one of KINDS at `path`; a link leads to `linked`."""
    if kind == "link":
        path.symlink_to(linked)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
