"""The files of one attempt, sent and collected. Made without loading the modules that do it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ..errors import LaunchError
from ..inputs.host import Host
from ..wire.frames import text_of

if TYPE_CHECKING:
    from .collector import Collector
    from .manifest import SyncManifest
    from .trace_files import TraceFiles


class SyncJob(NamedTuple):
    """`manifest` None: no files are sent. The collectors are those of all attempts."""

    manifest: SyncManifest | None = None
    is_forced: bool = False
    collector: Collector | None = None
    trace: TraceFiles | None = None


def root_on(host: Host, root: bytes, cwd: bytes) -> str:
    """Return the folder's place on a host: the same path, or one by which the job's folder is that of cwd=.

    Errors: LaunchError if cwd= names no such place
    """
    if host.cwd is None:
        return text_of(root)
    inner = os.path.relpath(cwd, root)
    if inner == b"." or (inner + b"/").startswith(b"../"):
        return host.cwd
    ending = "/" + text_of(inner)
    if not host.cwd.rstrip("/").endswith(ending):
        raise LaunchError(
            f"{host.name}: cwd={host.cwd} does not end in {ending[1:]}, the folder in --sync that the job "
            "starts in; let it end so, or start from the folder that is sent"
        )
    return host.cwd.rstrip("/").removesuffix(ending)
