"""The user's choices for the screen, and facts about the job beside its events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`by` is `ranks`, `hosts`, or empty: by the size of the job. `sort` is a title of a column; `offset` the
    number of rows that are above the screen. `keys` are shown at the bottom, with their meaning.
    """

    by: str = ""
    sort: str = ""
    offset: int = 0
    keys: tuple[tuple[str, str], ...] = ()
    message: str = ""  # instead of the keys, for a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The job as its record has it: `state` is a word, `why` a sentence on a job that is lost. Times are
    seconds since the epoch, 0 for events that have not happened.
    """

    name: str
    state: str
    is_live: bool = True
    why: str = ""
    began_at: float = 0.0
    ended_at: float = 0.0
    num_hosts: int = 0
    num_ranks: int = 0
    attempt: int = 0
    exit_code: int | None = None
    verdict: str = ""
    has_events: bool = True
