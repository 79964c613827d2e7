"""A job in the foreground among the records: there as long as its process, so that other commands find it."""

from __future__ import annotations

from ..options import Options
from .own_entry import EntryWatch, OwnEntry, make_folder


def watch_foreground(options: Options) -> EntryWatch | None:
    """Return the keeper of such a job's record; None if no job is to be started."""
    if options.dry_run:
        return None
    return EntryWatch(lambda: OwnEntry(make_folder(options), options, is_detached=False))
