"""What leads into the container that a host's ranks run in."""

from __future__ import annotations

import click

from ..inputs.exec_prefix import EXAMPLE, PrefixMistake, read_prefix


def _prefix(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value and not value.strip():  # "$IN $BOX", and neither is set
        raise click.BadParameter(f"{value!r} has no word in it; write e.g. {EXAMPLE!r}, or leave it out")
    try:
        return () if value is None else read_prefix(value)
    except PrefixMistake as mistake:
        raise click.BadParameter(f"{value!r}: {mistake}; write e.g. {EXAMPLE!r}") from None


OPTION = click.Option(
    ["--exec_prefix"],
    callback=_prefix,
    metavar="WORDS",
    help=(
        'On every host, run the job inside a container that these words lead into: "podman exec -i box". '
        "{host} is the host's name."
    ),
)
