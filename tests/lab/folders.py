"""The private folders of a host: /root, /tmp, /var/tmp, /var/log, /etc/ssh."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import ssh
from .place import Place

MODES = {"home": 0o700, "tmp": 0o1777, "var_tmp": 0o1777, "log": 0o755, "ssh": 0o755}
# Hidden by mounts of each host's own, so what is below them must be put back to be seen.
EMPTIED = {"home": "/root", "tmp": "/tmp", "var_tmp": "/var/tmp"}


def make(place: Place, host: str) -> None:
    """Make the folders of a new host, host key included."""
    for name, mode in MODES.items():
        folder = place.host_folder(host) / name
        folder.mkdir(parents=True)
        folder.chmod(mode)
    ssh.write_etc_ssh(place, host)


def empty(place: Place, host: str, *, dev_shm: Path) -> None:
    """Take out what was added to /root, /tmp, /var/tmp and /dev/shm since; ~/.ssh is written afresh."""
    ssh.write_home_ssh(place, place.host_folder(host) / "home")
    for name, seen_as in EMPTIED.items():
        # Mount points stay: removing one from outside would take the mount away inside.
        _empty(place.host_folder(host) / name, keep={".ssh", *_mount_points_below(place, seen_as)})
    _empty(dev_shm, keep=_mount_points_below(place, "/dev/shm"))


def _empty(folder: Path, *, keep: set[str]) -> None:
    for entry in os.scandir(folder):
        if entry.name not in keep:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _mount_points_below(place: Place, folder: str) -> set[str]:
    """The first name below `folder` of every path that all hosts see there."""
    paths = [Path(line.split(" ", 1)[1]) for line in place.paths.read_text().splitlines()]
    return {path.relative_to(folder).parts[0] for path in paths if Path(folder) in path.parents}
