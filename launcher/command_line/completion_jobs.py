"""The jobs that can be completed behind logs, attach, stop, stacks and top."""

from __future__ import annotations

from ..registry.known_jobs import exact_names, known_jobs


def completed_jobs(start: str) -> list[str]:
    """The names that begin so, the newest job first; exact ones where several have the name.

    Errors: LaunchError if the folder of records is not ours alone
    """
    names = exact_names(known_jobs()).values()
    return [one for one in reversed(list(names)) if one.startswith(start)]
