"""The file of a page; a file of another program is never overwritten."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import LaunchError
from ..node.system.plain_file import read_plain
from ..output.job_report import check_place, is_of_system, put_file
from .page import GENERATOR

_MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()
_START_BYTES = 1000  # the mark stands in these


def default_place(label: str) -> Path:
    """Return `LABEL.html` in the current folder."""
    name = re.sub("[^A-Za-z0-9._-]+", "-", label).strip("-.")[:100]
    return Path(f"{name or 'run'}.html")


def check_page_place(path: Path, *, option: str = "--output") -> None:
    """Check, before it is made, that the page can be written there; `option` names the place.

    Errors: LaunchError if not, or if the file there is no page of ours
    """
    check_place(path, option=option)
    if is_of_system(path.parent) or not path.exists():
        return
    try:
        is_ours = _MARK in read_plain(str(path), max_bytes=_START_BYTES)
    except OSError as error:
        raise LaunchError(f"{option}={path}: cannot be read: {error.strerror}; give another name") from None
    if not is_ours and path.stat().st_size:
        raise LaunchError(
            f"{option}={path} is there already, and is no page of dslaunch report; give another name, or "
            "move it away"
        )


def write_page(path: Path, page: str, *, option: str = "--output") -> int:
    """Write the page; return its size in bytes.

    Errors: LaunchError if it cannot be written
    """
    data = page.encode("utf-8", "replace")
    try:
        if is_of_system(path.parent):
            path.write_bytes(data)
        else:
            put_file(path, data)
    except OSError as error:
        raise LaunchError(f"{option}={path}: cannot be written: {error.strerror}") from None
    return len(data)
