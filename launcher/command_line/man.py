"""`dslaunch man`: the manual page, made of the help texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import click

from .cli import COMMANDS, dslaunch
from .help_topics import COMMANDS as SUMMARIES, TOPICS
from .job_help import EXAMPLES, absent_records, job_records, topic_records
from .prefix_command import SETTINGS, PrefixCommand, option_records

EPILOG = """
\b
Examples:
  dslaunch man | man -l -
      read it
  dslaunch man > ~/.local/share/man/man1/dslaunch.1
      put it where `man dslaunch` finds it
"""
# Characters that roff would interpret, or replace by similar ones, and how to write them instead.
_SIGNS = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
_ROFF = str.maketrans(_SIGNS)


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
def command(**given: Any) -> int:
    """Print the manual page of dslaunch in roff, which `man` reads."""
    from ... import __version__

    click.echo("\n".join(_page(__version__)))
    return 0


def _page(version: str) -> Iterator[str]:
    """Yield the lines of dslaunch(1). They have no date: the same version gives the same page."""
    yield f'.TH DSLAUNCH 1 "" "dslaunch {version}" "User Commands"'
    yield from [".nh", ".ad l"]  # no hyphens: an option that is broken over two lines cannot be copied
    yield from [".SH NAME", "dslaunch \\- start one training job on many machines"]
    yield from [".SH SYNOPSIS", ".B dslaunch", "[OPTIONS] SCRIPT [ARGS]...", ".br"]
    yield from [".B dslaunch", "COMMAND ..."]
    yield ".SH DESCRIPTION"
    yield from _text(dslaunch.help or "")
    yield from _text(EXAMPLES)
    yield ".SH OPTIONS"
    with click.Context(dslaunch, info_name="dslaunch", **dslaunch.context_settings) as context:
        records = job_records(context, dslaunch)
    for topic in TOPICS:
        yield f".SS {_roff(topic.title)}"
        yield from _records(topic_records(topic, dslaunch, records))
        yield from _text(topic.text)
    yield from [".SH OPTIONS OF OTHER LAUNCHERS", ".PP", "These are not here:"]
    yield from _records(absent_records())
    yield ".SH COMMANDS"
    yield from _records(list(SUMMARIES.items()))
    for name, module in COMMANDS.items():
        found: click.Command = import_module(module, __package__).command
        yield from _command(f"dslaunch {name}", found)
    yield from [".SH SEE ALSO", ".BR ssh (1),", ".BR ssh_config (5)"]


def _command(name: str, command: click.Command) -> Iterator[str]:
    """Yield the command's section; after that of a group, the sections of its subcommands."""
    with click.Context(command, info_name=name, **command.context_settings) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        records = option_records(context, command)
        shown = [
            records[one.name or ""]
            for one in command.get_params(context)
            if one.name in records and (one not in dslaunch.params or name != "dslaunch env")
        ]
    yield f".SH {_roff(name.upper())}"
    yield from [".PP", f".B {_roff(name)}", _roff(usage)]
    yield from _text(command.help or "")
    yield from _records(shown)
    yield from _text(command.epilog or "")
    if isinstance(command, click.Group):
        for one, inner in command.commands.items():
            yield from _command(f"{name} {one}", inner)


def _records(records: Sequence[tuple[str, str]]) -> Iterator[str]:
    for written, does in records:
        yield from [".TP", f".B {_roff(written)}", _roff(does)]


def _text(text: str) -> Iterator[str]:
    """Yield paragraphs as click reads them: one that begins with \\b keeps its lines."""
    for paragraph in text.strip("\n").split("\n\n"):
        lines = [line.rstrip() for line in paragraph.strip("\n").split("\n")]
        if lines[0].strip() == "\b":
            yield from [".PP", ".nf", *(_roff(line) for line in lines[1:]), ".fi"]
        elif any(lines):
            yield from [".PP", *(_roff(line.strip()) for line in lines)]


def _roff(line: str) -> str:
    """Return a line that roff prints unchanged."""
    escaped = line.translate(_ROFF)
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
