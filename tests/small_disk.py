"""Small file systems, for what is to be seen when a disk is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(folder: Path, options: str) -> Iterator[Path]:
    """Inside, the folder, which is made, is a file system in memory; `options` are mount's, such as
    `size=256k`. Where none can be mounted, as by another user than root, the test is skipped.
    """
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
