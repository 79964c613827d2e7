"""The file of --save_pid: where scripts find the process that runs a job on this host. Standard library only."""

from __future__ import annotations

import os

from .lean import suppress


class PidFileInUse(Exception):
    """The file is there, and the process it names runs."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(f"{path} is there already, and process {pid} that it names runs")


def write_pid_file(launcher_pid: int, pid: int, *, folder: str = "/tmp") -> str:
    """Write `pid` into the file named for the launcher; returns its path. One left by a dead process is replaced.

    Errors: PidFileInUse; OSError if it cannot be written
    Source: DeepSpeed 0.19.8 launcher/launch.py, `--save_pid`: the same name, so the same scripts find it.
    """
    path = os.path.join(folder, f"{launcher_pid}.deepspeed")
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _remove_if_stale(path)
            continue
        with open(fd, "w", encoding="ascii") as file:
            file.write(str(pid))
        return path


def _remove_if_stale(path: str) -> None:
    with suppress(FileNotFoundError):
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        if text.isdigit() and os.path.exists(f"/proc/{text}"):
            raise PidFileInUse(path, int(text))
        os.unlink(path)
