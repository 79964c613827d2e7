"""`dslaunch help`: every option of a job, by topic, and the help of the other commands."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from .cli import COMMANDS, dslaunch
from .help_screen import HelpScreen
from .help_topics import TOPICS
from .job_help import topic_names, write_topics
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = f"""
\b
Examples:
  dslaunch help hosts
      the options that name hosts, and how they are reached
  dslaunch help all
      every option
  dslaunch help checkpoint verify
      the same as dslaunch checkpoint verify --help

TOPIC is {", ".join(topic_names()[:-1])} or all, or a command.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument(
    "topic",
    nargs=-1,
    metavar="[TOPIC]",
    shell_complete=lambda context, parameter, start: [
        name for name in (*topic_names(), *COMMANDS) if name.startswith(start)
    ],
)
def command(**given: Any) -> int:
    """Show the options of a job that belong to TOPIC, or the help of a command.

    Without TOPIC it shows the same as `dslaunch --help`.
    """
    words: tuple[str, ...] = given["topic"]
    if not words:
        click.echo(_help_of(dslaunch, "dslaunch"))
    elif words[0] in COMMANDS:
        click.echo(_command_help(words))
    elif words[0] in topic_names() and len(words) == 1:
        click.echo(_topic_help(words[0]))
    else:
        raise click.UsageError(_refusal(words))
    return 0


def _help_of(found: click.Command, name: str) -> str:
    with click.Context(found, info_name=name, **found.context_settings) as context:
        return found.get_help(context)


def _command_help(words: tuple[str, ...]) -> str:
    found: click.Command = import_module(COMMANDS[words[0]], __package__).command
    name = "dslaunch"
    for place, word in enumerate(words):
        if place:
            if not isinstance(found, click.Group):
                raise click.UsageError(f"{name} has no commands of its own; write: dslaunch help {words[0]}")
            with click.Context(found, info_name=name, **found.context_settings) as context:
                inner = found.get_command(context, word)
            if inner is None:
                raise AssertionError(f"{word!r} is neither found nor refused")
            found = inner
        name += f" {word}"
    return _help_of(found, name)


def _topic_help(name: str) -> str:
    topics = [one for one in TOPICS if name in (one.name, "all")]
    with click.Context(dslaunch, info_name="dslaunch", **dslaunch.context_settings) as context:
        formatter = HelpScreen(context)
        write_topics(formatter, context, dslaunch, topics)
    return formatter.getvalue().strip("\n")


def _refusal(words: tuple[str, ...]) -> str:
    import difflib

    if words[0] in topic_names():
        return f"one topic at a time; write: dslaunch help {words[0]}"
    near = difflib.get_close_matches(words[0].lower(), (*topic_names(), *COMMANDS), n=1)
    hint = f"did you mean `dslaunch help {near[0]}`?" if near else "write one of these, or a command"
    return f"there is no topic {words[0]!r}; topics are {', '.join(topic_names())}; {hint}"
