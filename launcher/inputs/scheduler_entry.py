"""A scheduler's entry for one host, and errors in it."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import LaunchError
from .host import Pairs

WAY_OUT = "unset it, or name the hosts with --hostfile (--launcher=local: this machine only)"
_SHOWN_LENGTH = 120


class SchedulerEntry(NamedTuple):
    """A host that a scheduler named. `slots` None: only the name was given, perhaps once a slot."""

    name: str
    slots: int | None
    place: SchedulerPlace
    user: str | None = None


class SchedulerPlace(NamedTuple):
    """The place of the entry: `where` is a variable, with its file and line if it names a file."""

    where: str
    text: str

    def refusal(self, why: str, *, example: Pairs = (), key: str = "", name: str = "") -> LaunchError:
        return refusal(self.where, self.text, why)


def refusal(where: str, text: str, why: str) -> LaunchError:
    """Return the error for a value that a scheduler wrote: it tells the user how to do without the value."""
    shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
    return LaunchError(f"{where}: {shown!r}: {why}; {WAY_OUT}")
