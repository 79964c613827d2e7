"""`dslaunch trace`: print again where the time of a trace went."""

from __future__ import annotations

from typing import Any

import click

from ..inputs.rank_set import parse_ranks
from ..output.screen_text import screen_text
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch --trace 10-12 -H hosts train.py
      trace these steps, into trace-train.json.gz
  dslaunch trace trace-train.json.gz
      the table that was printed then
  dslaunch trace trace-train.json.gz --trace_ranks 3
      the same of rank 3 alone

The file itself is for https://ui.perfetto.dev, which opens it without sending it anywhere.
"""


def _ranks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[range, ...] | None:
    if value is None:
        return None
    try:
        return parse_ranks(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.option("--trace_ranks", metavar="RANKS", callback=_ranks, help="These ranks alone: 0,4-7, or all.")
@click.argument("file", metavar="FILE")
def command(**given: Any) -> int:
    """Print where the time of the steps in FILE, a trace written by --trace, went: for each rank, and by
    unit and operator.
    """
    from ..trace.shown import lines_of_file

    text = screen_text(lines_of_file(given["file"], ranks=given["trace_ranks"]))
    click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
    return 0
