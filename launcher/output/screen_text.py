"""Lines that are safe and short enough for a screen."""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.table import terminal_columns
from ..wording import cleaned, wrapped


def screen_text(lines: Sequence[str]) -> str:
    """Return the lines without signs that steer the terminal, and broken to its width."""
    columns = terminal_columns()
    return "".join(
        f"{cleaned(line) if columns is None else wrapped(cleaned(line), columns)}\n" for line in lines
    )
