"""Words for people."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown_size(num_bytes: int) -> str:
    """Three digits or so: `503 GiB`, `1.5 GiB`, `64 MiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, place = float(num_bytes), 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:.1f} {units[place]}" if place and value < 10 else f"{value:.0f} {units[place]}"


def shown_ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
