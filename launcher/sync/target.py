"""A host as files go to it, and the folder that they come from."""

from __future__ import annotations

import os
from typing import Protocol

from ..errors import LaunchError
from ..wire.frames import Frame
from ..wire.manifest import OWN_FOLDER


class SyncTarget(Protocol):
    """The part of a HostState (controller/roster.py) that files need."""

    @property
    def name(self) -> str: ...

    @property
    def is_over(self) -> bool:
        """Tell whether no more frames are sent to it."""
        ...

    def send(self, *frames: Frame) -> None: ...


def checked_folder(given: str, option: str = "--sync") -> bytes:
    """Return the absolute path of a folder that may be sent.

    Errors: LaunchError if it is no folder, or so large that it cannot be meant
    """
    if not os.path.isdir(given):
        raise LaunchError(
            f"{option}={given} is no folder; give the folder that the job runs in, e.g. {option} ."
        )
    root = os.path.abspath(os.fsencode(given))
    real, home = os.path.realpath(root), os.path.realpath(os.path.expanduser(b"~"))
    if (home + b"/").startswith(real.rstrip(b"/") + b"/"):
        what = (
            "the root of all folders" if real == b"/" else "your home" if real == home else "above your home"
        )
        hint = "give the folder that the job needs"
        raise LaunchError(f"{option}={given} is {what}, which is not sent to other hosts; {hint}")
    return root


class Marker:
    """A file in the folder that shows, on a host, that its folder is this one; gone when it is closed.

    Where it cannot be written no host sees one, and a shared folder is found to be as offered.
    """

    def __init__(self, root: bytes) -> None:
        self._folder = os.path.join(root, OWN_FOLDER)
        name = b"here-" + os.urandom(16).hex().encode()
        self.path = OWN_FOLDER + b"/" + name
        self._whole = os.path.join(root, self.path)
        self._has_made_folder = False
        try:
            if not os.path.isdir(self._folder):
                os.mkdir(self._folder, 0o755)
                self._has_made_folder = True
            os.close(os.open(self._whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError:
            pass

    def close(self) -> None:
        try:
            os.unlink(self._whole)
            if self._has_made_folder:
                os.rmdir(self._folder)
        except OSError:
            pass
