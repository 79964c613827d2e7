"""The prefix of each line of a worker: a template with the worker's place in the job."""

from __future__ import annotations

import os
from string import Formatter
from typing import NamedTuple

from .rank_set import format_ranks

DEFAULT_TEMPLATE = "{host}:{rank} |"
FIELDS = ("host", "rank", "local_rank", "node_rank", "stream")
STREAM_NAMES = {1: "stdout", 2: "stderr"}
MAX_HOSTS_NAMED = 4  # hosts named before a folded line; more would push the line itself off the screen
MAX_PREFIX_LENGTH = 200


class Origin(NamedTuple):
    """The worker that a line comes from. `role` is empty for a rank; a server has the name of its role, and a
    number in the place of a rank.
    """

    host: str
    node_rank: int
    rank: int
    local_rank: int
    role: str = ""

    @property
    def name(self) -> str:
        """Return the number of a rank, or the role of a server."""
        return self.role or str(self.rank)


def check_template(template: str) -> None:
    """Errors: ValueError, with a sentence, if this is not a template of FIELDS on one line."""
    if "\n" in template or "\r" in template:
        raise ValueError(f"{template!r} has more than one line; leave out the line end")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{template!r}: {str(error).lower()}; write {{{{ for a brace itself") from None
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if field not in FIELDS:
            raise ValueError(
                f"there is no field {{{field}}}; the fields are {' '.join(f'{{{one}}}' for one in FIELDS)}"
            )
        if conversion or "{" in (spec or "") or sum(map(str.isdigit, spec or "")) > 3:
            raise ValueError(
                f"{template!r}: only a width such as {{{field}:3}} may follow the name of a field"
            )
    try:
        length = len(_text(template, Origin("", 0, 0, 0), 1))
    except ValueError as error:
        raise ValueError(f"{template!r}: {str(error).lower()}; write {{rank:03}} for 3 digits") from None
    if length > MAX_PREFIX_LENGTH:
        raise ValueError(f"a prefix of {length} characters; {MAX_PREFIX_LENGTH} are allowed")


def prefix(template: str, origin: Origin, stream: int) -> bytes:
    """Fill in the template; add a space unless the template ends with one or is empty."""
    text = _text(template, origin, stream)
    if template and not template[-1].isspace():
        text += " "
    return os.fsencode(text)


def folded_prefix(origins: tuple[Origin, ...]) -> bytes:
    """Return a prefix for several workers' line: `host1:0-3, host2:4-7 | `, or `ranks 0-511 | `."""
    ranks_of: dict[str, list[int]] = {}  # servers' lines are not folded
    for one in sorted(origins, key=lambda one: one.rank):
        ranks_of.setdefault(one.host, []).append(one.rank)
    if len(ranks_of) > MAX_HOSTS_NAMED:
        return f"ranks {format_ranks(one.rank for one in origins)} | ".encode()
    return ", ".join(f"{host}:{format_ranks(ranks)}" for host, ranks in ranks_of.items()).encode() + b" | "


def _text(template: str, origin: Origin, stream: int) -> str:
    values = {**origin._asdict(), "rank": _RoleName(origin.role)} if origin.role else origin._asdict()
    return template.format(**values, stream=STREAM_NAMES[stream])


class _RoleName(str):
    """The name of a role in the place of a rank, for which the template may ask for digits."""

    def __format__(self, spec: str) -> str:
        width = "".join(filter(str.isdigit, spec))
        return self.rjust(int(width or 0))
