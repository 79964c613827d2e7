"""What the kernel says in files. Sent to the nodes: standard library only."""

from __future__ import annotations


def read_text(path: str) -> str:
    """Empty if it cannot be read. A byte that is not UTF-8 is a lone surrogate."""
    try:
        with open(path, "rb", 0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
