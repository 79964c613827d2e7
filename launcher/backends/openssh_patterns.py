"""OpenSSH's patterns, as they stand in a configuration and in known_hosts: `*`, `?`, and `!` in front."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence


def fits(pattern: str, text: str) -> bool:
    """Tell whether one pattern, without `!`, matches this text; upper and lower case differ."""
    return pattern == text or (has_signs(pattern) and _regex(pattern).fullmatch(text) is not None)


def fits_list(patterns: Sequence[str], text: str) -> bool:
    """Tell whether one pattern matches this text, and none that begins with `!` does."""
    if any(one.startswith("!") and fits(one[1:], text) for one in patterns):
        return False
    return any(fits(one, text) for one in patterns if not one.startswith("!"))


def has_signs(pattern: str) -> bool:
    return "*" in pattern or "?" in pattern


@functools.lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    signs = {"*": ".*", "?": "."}
    # Otherwise the time to match grows with a power of the number of `*`
    shortest = re.sub(r"\*+", "*", pattern)
    return re.compile("".join(signs.get(one) or re.escape(one) for one in shortest), re.DOTALL)
