"""A job in the foreground among the records: there as long as its process, so that others find it."""

from __future__ import annotations

from ..options import Options
from .own_entry import EntryWatch, OwnEntry, make_folder


def watch_foreground(options: Options) -> EntryWatch | None:
    """What keeps the record of such a job; None if nothing is to be started."""
    if options.dry_run:
        return None
    return EntryWatch(lambda: OwnEntry(make_folder(options), options, is_detached=False))
