"""The options about files: places, checked before any host is contacted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..job.plan import Plan
from ..options import Options
from ..output.console import Console
from ..sync.collector import Collector
from ..sync.manifest import SyncManifest, walk
from ..sync.sync_job import SyncJob, root_on
from ..sync.target import checked_folder
from ..wire.frames import bytes_of
from ..wording import count, shown_size

if TYPE_CHECKING:
    from ..sync.trace_files import TraceFiles

MAX_NAMED = 4


def files_of(
    options: Options, plan: Plan, console: Console, *, before: SyncJob | None = None
) -> SyncJob | None:
    """Return the files to move; None if there are none. `before` is that of the attempt before.

    Errors: LaunchError for a folder that cannot be sent, or cannot be written
    """
    if not options.moves_files:
        return None
    before = before or SyncJob()
    trace = before.trace
    if options.trace.is_on and trace is None:
        trace = trace_files_of(options)
    job = _synced(options, plan, console, collector=before.collector) if options.sync.is_on else SyncJob()
    return job._replace(trace=trace)


def trace_files_of(options: Options) -> TraceFiles:
    """Return the place where traces come together.

    Errors: LaunchError if they could not be kept
    """
    from ..sync.trace_files import TraceFiles
    from ..trace.write import refuse_place

    refuse_place(options.trace)
    try:
        return TraceFiles()
    except OSError as error:
        raise LaunchError(
            f"--trace: no temporary folder can be made: {error}; make room, or set TMPDIR"
        ) from None


def _synced(options: Options, plan: Plan, console: Console, *, collector: Collector | None) -> SyncJob:
    """Combine --sync and --collect."""
    if options.sync.patterns and collector is None:
        _refuse_place(options.sync.place)
        collector = Collector(options.sync.patterns, os.fsencode(options.sync.place))
    if options.sync.folder is None:
        return SyncJob(collector=collector)
    root, cwd = checked_folder(options.sync.folder), bytes_of(plan.cwd)
    others = [node for node in plan.all_nodes if not node.is_local]
    for node in others:
        root_on(node.host, root, cwd)
    if not (os.path.realpath(cwd) + b"/").startswith(os.path.realpath(root) + b"/"):
        console.warn(
            f"--sync={options.sync.folder}: the job starts in {os.fsdecode(cwd)}, which is not in there, so "
            "every host must have it"
        )
    if not others:
        console.warn("--sync has no effect, for all ranks run on this machine")
        return SyncJob(collector=collector)
    return SyncJob(_walk(root, options, console), options.sync.is_forced, collector)


def _refuse_place(place: str) -> None:
    """Check the place now, since the job may take days. Errors: LaunchError if no folder can be made there"""
    path = os.path.abspath(place)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    why = "is no folder" if not os.path.isdir(path) else "cannot be written by you"
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(
            f"--collect_to={place}: {path} {why}, so no file could come back; name another folder"
        )


def _walk(root: bytes, options: Options, console: Console) -> SyncManifest:
    manifest = walk(root, besides=_besides(options))
    if manifest.skipped:
        console.say(f"--sync: not sent: {_some(manifest.skipped)}")
    if manifest.unread_rules:
        console.warn(f"--sync: what is ignored does not stand in {_some(manifest.unread_rules)}, as for git")
    return manifest


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def describe_sync(options: Options, plan: Plan) -> str:
    """Return one line for --dry_run. Errors: LaunchError as files_of()"""
    root = checked_folder(options.sync.folder or "")
    manifest = walk(root, besides=_besides(options), reads=False)
    places = [
        f"{node.host.name}:{root_on(node.host, root, bytes_of(plan.cwd))}"
        for node in plan.all_nodes
        if not node.is_local
    ]
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return (
        f"sync: {count(manifest.num_files, 'file')}, {shown_size(manifest.num_bytes)}, to "
        f"{', '.join(places[:MAX_NAMED]) or 'no other host'}{more}"
    )


def _besides(options: Options) -> list[bytes]:
    """List folders that jobs fill here: they are not sent with the next job."""
    places = [options.sync.place, options.logs.log_dir]
    return [os.path.abspath(os.fsencode(one)) for one in places if one is not None]
