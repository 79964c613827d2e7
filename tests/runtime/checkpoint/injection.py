"""Faults at every step: the k-th operation on files under a folder, or the k-th collective,
fails on this rank.

Python tells of each open, rename, mkdir, remove, truncate and listing before it does it (sys.audit), so no
list of calls has to be kept here. What it does not tell, the writes of the disk engine, reads into buffers
and fsync, is wrapped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dslaunch.runtime.checkpoint.files import archive
from dslaunch.runtime.comm.wire import Wire

from dslaunch.kernels.disk import DiskEngine, DiskFile  # isort: skip


@dataclass
class Fault:
    """Which operation fails; `num_seen` counts them.

    `is_lasting`: all later ones fail, too, as when a disk is gone.
    """

    at: int
    folder: Path
    is_lasting: bool = False
    num_seen: int = 0
    what: list[str] = field(default_factory=list)  # those that have failed

    def pass_by(self, what: str) -> None:
        self.num_seen += 1
        if self.num_seen == self.at or (self.is_lasting and self.num_seen > self.at):
            self.what.append(what)
            raise OSError(5, f"injected fault {self.num_seen}: {what}")

    @property
    def has_struck(self) -> bool:
        return bool(self.what)


_armed: list[Fault] = []  # at most one


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _armed or not event.startswith(("open", "os.")):
        return
    fault = _armed[0]
    if any(isinstance(one, str | os.PathLike) and str(one).startswith(str(fault.folder)) for one in args):
        fault.pass_by(f"{event} {args[0]}")


@cache
def _listen() -> None:
    sys.addaudithook(_audit)  # for as long as the process lives


def _before(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def do(*args: Any, **kwargs: Any) -> Any:
        if _armed:
            _armed[0].pass_by(what)
        return function(*args, **kwargs)

    return do


@contextmanager
def files_fail(fault: Fault) -> Iterator[Fault]:
    """Inside, the operation on files that `fault` names fails."""
    _listen()
    with ExitStack() as stack:
        for home, name in (
            (DiskEngine, "create"),
            (DiskFile, "write"),
            (os, "fsync"),
            (archive, "_read_into"),
        ):
            stack.enter_context(patch.object(home, name, _before(getattr(home, name), name)))
        _armed.append(fault)
        try:
            yield fault
        finally:
            _armed.clear()


@contextmanager
def collectives_fail(fault: Fault) -> Iterator[Fault]:
    """Inside, the collective that `fault` names fails before this rank takes part in it."""
    with patch.object(Wire, "begin", _before(Wire.begin, "collective")):
        _armed.append(fault)
        try:
            yield fault
        finally:
            _armed.clear()
