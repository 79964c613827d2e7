"""Sizes in words: `24GB` counts in thousands, `22.5GiB` in 1024."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]+\.?[0-9]*)\s*([kmgt]i?b|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_MOST = 1 << 60


def read_size(text: str, *, needs_unit: bool = True) -> int | None:
    """Return the bytes of a size, None if it is no size above 0; without a unit a number counts bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (needs_unit and not match[2]):
        return None
    unit = (match[2] or "b").lower()
    num_bytes = int(float(match[1]) * (1024 if unit[1:2] == "i" else 1000) ** _POWERS.get(unit[0], 0))
    return num_bytes if 0 < num_bytes < _MOST else None
