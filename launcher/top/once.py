"""One frame as plain text."""

from __future__ import annotations

import shutil
import sys
import time

from .bars import ASCII, BLOCKS, Glyphs
from .frame import make_frame
from .spans import plain
from .view import JobFacts, View
from .watched import Watched

_WIDTH = 100  # where no terminal and no COLUMNS gives it


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return blocks, if they can be written in this encoding."""
    try:
        "".join(BLOCKS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def frame_text(watched: Watched, view: View) -> str:
    """Return all of the screen's content about the job now, however long; it ends with a line end."""
    while not watched.look():
        pass
    facts: JobFacts = watched.facts
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    encoding = sys.stdout.encoding if sys.stdout is not None else None
    height = len(watched.state.ranks) + len(watched.state.servers) + len(watched.state.hosts) + 100
    frame = make_frame(
        watched.state, facts, view, width=width, height=height, now=time.time(), glyphs=glyphs_for(encoding)
    )
    lines = [plain(one).rstrip() for one in frame.lines]
    kept = [text for place, text in enumerate(lines) if text or (place and lines[place - 1])]
    while kept and not kept[-1]:
        kept.pop()
    text = "\n".join(kept) + "\n"
    return text.encode(encoding or "ascii", "replace").decode(encoding or "ascii")
