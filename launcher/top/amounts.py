"""Numbers in few columns."""

from __future__ import annotations

import math


def shown_number(value: float) -> str:
    """Write four digits or so: `2.314`, `0.0123`, `1.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:.2e}"


def shown_many(value: float) -> str:
    """Write a count: `931`, `35.2k`, `1.2M`."""
    if not math.isfinite(value):
        return str(value)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.3g}{unit}" if abs(value) < 999.5 else f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError(value)


def shown_rate(value: float, noun: str) -> str:
    """Write `2.5 steps/s`, or `31 s/step` where it is slow. `noun` has an s at its end."""
    if 0 < value < 0.1:
        return f"{1 / value:.3g} s/{noun[:-1]}"
    return f"{shown_many(value)} {noun}/s"


def shown_seconds(value: float) -> str:
    """Write the seconds of a step: `0.402 s`, `12.3 s`."""
    if value < 0.01:
        return f"{value * 1000:.2f}ms"
    return f"{value:.3f}s" if value < 10 else f"{value:.1f}s" if value < 1000 else f"{value:.0f}s"


def shown_share(value: float) -> str:
    """Write `41%`."""
    return f"{min(9.99, max(0.0, value)) * 100:.0f}%"
