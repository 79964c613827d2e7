"""The limits of a job's sections: what was given, and how long this program stood still before."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import LaunchError
from ..job.section_limits import SectionLimits
from ..options import Options
from ..options.hang_limit import SECTIONS, GivenLimits
from ..registry.state_folder import LIMITS, readable_folder, writable_folder

_LONGEST_NAME = 64
_MOST_BYTES = 1 << 16


def limits_of(options: Options) -> SectionLimits | None:
    """Return the limits of this job; None if it has none: its ranks tell no numbers, or nobody asks for them.

    Errors: LaunchError for --hang_limit where no numbers are told
    """
    given = options.restart.hang_limit
    if not options.metrics.interval_s:
        if given is not None and (given.seconds or given.learns):
            raise LaunchError(
                "--hang_limit needs the numbers of ranks, and with --metrics_interval=0 they tell none; "
                "leave one of them out"
            )
        return None
    if given is None:
        given = GivenLimits({}, learns=options.may_start_again)
    if not given.learns:
        return None
    return SectionLimits(given, _known(options))


def keep_limits(options: Options, limits: SectionLimits) -> None:
    """Keep what was learned for the next job of this program. What cannot be kept is learned again."""
    learned = limits.learned
    if not learned:
        return
    try:
        path = writable_folder(LIMITS) / _file_name(options)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(learned))
        partial.replace(path)
    except (LaunchError, OSError):
        pass


def _known(options: Options) -> Mapping[str, float]:
    try:
        folder = readable_folder(LIMITS)
        if folder is None:
            return {}
        with open(folder / _file_name(options), encoding="utf-8") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (LaunchError, OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        section: float(found[section])
        for section in SECTIONS
        if type(found.get(section)) in (int, float) and 0 < found[section] < math.inf
    }


def _file_name(options: Options) -> str:
    program = f"{os.getcwd()}\0{options.program}".encode("utf-8", "surrogateescape")
    stem = "".join(one if one.isalnum() else "_" for one in Path(options.program).stem)[:_LONGEST_NAME]
    return f"{stem}.{hashlib.sha256(program).hexdigest()[:16]}.json"
