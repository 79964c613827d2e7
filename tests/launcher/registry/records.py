"""Records of jobs as tests want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dslaunch.launcher.registry.record import JobRecord, JobState, this_boot, this_host, write_record


def make_record(jobs: Path, name: str = "train", key: str = "0001", **fields: Any) -> Path:
    """The folder of a job of this machine that has ended, unless the fields say otherwise."""
    given: dict[str, Any] = {
        "host": this_host(),
        "boot_id": this_boot(),
        "pid": 1,
        "command": ("dslaunch", "train.py"),
        "cwd": "/",
        "launcher": "ssh",
        "is_detached": True,
        "state": JobState.ENDED,
        **fields,
    }
    folder = jobs / f"{name}.{key}"
    folder.mkdir(mode=0o700)
    write_record(folder, JobRecord(name=name, key=key, **given))
    return folder
