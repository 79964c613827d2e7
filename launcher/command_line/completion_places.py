"""What can stand on a command line of dslaunch, as data: shells are told how to complete it from this."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import NamedTuple

import click

from ..options.backend import LAUNCHERS, WAY_OPTION, WAYS
from .cli import COMMANDS, dslaunch
from .help_topics import COMMANDS as SUMMARIES
from .job_help import topic_names


class Kind(Enum):
    """What a value is, as far as a shell can help with it."""

    FLAG = "none"
    FILE = "a file"
    FOLDER = "a folder"
    HOSTS = "hosts of the hostfile"
    JOBS = "jobs of this user"
    WORDS = "one of some words"
    FREE = "anything"


class Value(NamedTuple):
    """`words` are what it may be, of Kind.WORDS only."""

    kind: Kind
    words: tuple[str, ...] = ()


class Written(NamedTuple):
    """One option: its names, its value, what the value is called in help, and what the option does, in a
    few words.
    """

    names: tuple[str, ...]
    value: Value
    metavar: str
    does: str


class Place(NamedTuple):
    """What can follow `dslaunch` and these words: commands, options, and then arguments.

    `stops` says whether no option of ours follows the first argument.
    """

    words: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]  # names, and what they are for
    options: tuple[Written, ...]
    argument: Value
    stops: bool

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def names_with_value(self) -> tuple[str, ...]:
        return tuple(name for one in self.options if one.value.kind is not Kind.FLAG for name in one.names)


_OF_METAVAR = {
    "FILE": Kind.FILE,
    "DIR": Kind.FOLDER,
    "FOLDER": Kind.FOLDER,
    "OUT": Kind.FOLDER,
    "RUN": Kind.FILE,
    "A": Kind.FOLDER,
    "B": Kind.FOLDER,
    "HOSTS": Kind.HOSTS,
    "JOB": Kind.JOBS,
}
_OF_ARGUMENT = {"script": Kind.FILE, "program": Kind.FILE}


def places() -> tuple[Place, ...]:
    """A job first, then each command, the commands of a group behind it."""
    return tuple(_places())


def _places() -> Iterator[Place]:
    yield _place((), dslaunch, SUMMARIES | {"help": "every option, by topic"})
    for name, module in COMMANDS.items():
        found: click.Command = import_module(module, __package__).command
        inner = found.commands if isinstance(found, click.Group) else {}
        yield _place((name,), found, {one: inner[one].get_short_help_str() for one in inner})
        for one in inner:
            yield _place((name, one), inner[one], {})


def _place(words: tuple[str, ...], command: click.Command, commands: dict[str, str]) -> Place:
    with click.Context(command, info_name=command.name, **command.context_settings) as context:
        parameters = command.get_params(context)
    arguments = [one for one in parameters if isinstance(one, click.Argument)]
    return Place(
        words=words,
        commands=tuple(commands.items()),
        options=tuple(_written(one) for one in parameters if isinstance(one, click.Option)),
        argument=_argument(words, arguments),
        stops=not command.context_settings.get("allow_interspersed_args", True),
    )


def _written(option: click.Option) -> Written:
    return Written(
        names=(*option.opts, *option.secondary_opts),
        value=Value(Kind.FLAG) if option.is_flag else _value(option),
        metavar=option.metavar or (option.name or "").upper(),
        does=(option.help or "").partition("  [")[0].partition(". ")[0].rstrip(".:"),
    )


def _argument(words: tuple[str, ...], arguments: list[click.Argument]) -> Value:
    """What the first argument is; a shell offers the same for those that follow."""
    if words == ("help",):
        return Value(Kind.WORDS, (*topic_names(), *COMMANDS))
    if not arguments:
        return Value(Kind.FREE)
    first = arguments[0]
    return Value(_OF_ARGUMENT[first.name]) if first.name in _OF_ARGUMENT else _value(first)


def _value(parameter: click.Parameter) -> Value:
    if parameter.name == "launcher":
        return Value(Kind.WORDS, tuple(WAYS if parameter is WAY_OPTION else LAUNCHERS))
    if isinstance(parameter.type, click.Choice):
        return Value(Kind.WORDS, tuple(str(one) for one in parameter.type.choices))
    return Value(_OF_METAVAR.get(parameter.metavar or "", Kind.FREE))
