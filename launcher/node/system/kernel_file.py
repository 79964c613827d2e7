"""Files through which the kernel reports its state."""

from __future__ import annotations


def read_text(path: str) -> str:
    """Return the text; empty if it cannot be read. A byte that is not UTF-8 becomes a lone surrogate."""
    try:
        with open(path, "rb", 0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
