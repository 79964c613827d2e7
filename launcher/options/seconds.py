"""An option's value that is a time in seconds."""

from __future__ import annotations

import click


def seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """The value, if it is one that can be waited for; a heartbeat and a limit are one second or more."""
    if value is None:
        return None
    minimum = 1.0 if parameter.name in ("heartbeat", "prepare_timeout") else 0.0
    if not minimum <= value < float("inf"):
        raise click.BadParameter(f"{value:g} is not allowed; give seconds, {minimum:g} or more")
    return value
