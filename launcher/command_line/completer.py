"""Answers the key that completes: the words that may stand at the end of a line that begins with `dslaunch`.

click's code for bash, zsh and fish starts `dslaunch` with the words in its environment, and VARIABLE. That
takes 50 ms, and 80 ms where a hostfile is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from ..errors import LaunchError
from ..inputs.host import is_ipv6
from ..options import Options
from .cli import COMMANDS, VARIABLE, dslaunch
from .help_topics import COMMANDS as OF_HELP
from .prefix_command import PrefixCommand, Typed

Items = list[CompletionItem[str]]

_SUMMARIES = {**OF_HELP, "help": "every option, by topic"}
_BREAKS = "=:@"  # bash divides words at these signs as well as at blanks
_FILE, _FOLDER = "file", "dir"  # the shell looks for these itself
_OF_METAVAR = {
    **dict.fromkeys(("FILE", "RUN", "SCRIPT", "PROGRAM"), _FILE),
    **dict.fromkeys(("DIR", "FOLDER", "OUT", "A", "B"), _FOLDER),
}


def lines_for(shell: str) -> str:
    """Return the code that a shell reads at its start."""
    return _SHELLS[shell](dslaunch, {}, "dslaunch", VARIABLE).source()


def answer(instruction: str) -> None:
    """Print the possible words; `instruction` is the shell's name and `_complete`."""
    shell = _SHELLS[instruction.partition("_")[0]]
    click.echo(shell(dslaunch, {}, "dslaunch", VARIABLE).complete().encode())


class _Answers(ShellComplete):
    """Completes by our own commands, whose options may be shortened."""

    finds_values = False  # the shell looks for files after --option= itself

    def get_completions(self, args: list[str], incomplete: str) -> Items:
        """Return no words for a line that dslaunch would refuse."""
        try:
            found = completions(args, incomplete)
            if found and found[0].of_option and found[0].type != "plain" and not self.finds_values:
                name, equals, value = incomplete.partition("=")
                return [CompletionItem(f"{name}{equals}{one.value}") for one in _paths(value, found[0].type)]
            return found
        except (click.ClickException, LaunchError, OSError):
            return []


class _Bash(_Answers, BashComplete):
    """Joins words that bash cut apart, and returns only the part after its last cut."""

    finds_values = True
    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        pieces = [*split_arg_string(os.environ["COMP_WORDS"]), ""][: int(os.environ["COMP_CWORD"]) + 1]
        words, was_break = [""], True
        for piece in pieces:
            is_break = bool(piece) and not piece.strip(_BREAKS)
            if is_break or was_break:
                words[-1] += piece
            else:
                words.append(piece)
            was_break = is_break
        self._kept = words[-1].removesuffix("" if was_break else pieces[-1]).removesuffix("@")
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value.removeprefix(self._kept)}"


class _Zsh(_Answers, ZshComplete):
    pass


class _Fish(_Answers, FishComplete):
    """Answers for fish, in click's format, but with commas in a value or description written so that fish
    does not divide there.
    """

    source_template = FishComplete.source_template.replace("string split", "string split --max 1")


_SHELLS: dict[str, type[_Answers]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def completions(words: Sequence[str], last: str) -> Items:
    """Return the words that `last` may become after `dslaunch` and these words.

    Errors: click.UsageError and LaunchError for words that dslaunch would refuse
    """
    if not words and last[:1] != "-":
        found = [
            CompletionItem(name, help=does) for name, does in _SUMMARIES.items() if name.startswith(last)
        ]
        return [*found, *_paths(last, _FILE)] if found else [CompletionItem(last, type=_FILE)]
    command: click.Command = dslaunch
    if words and words[0] in COMMANDS:
        command = import_module(COMMANDS[words[0]], __package__).command
        words = words[1:]
    if isinstance(command, click.Group):
        if not words:
            inner = command.commands.items()
            return [
                CompletionItem(name, help=one.get_short_help_str())
                for name, one in inner
                if name.startswith(last)
            ]
        command, words = command.commands.get(words[0], command), words[1:]
    if not isinstance(command, PrefixCommand):
        return []
    with click.Context(command, info_name="dslaunch", **command.context_settings) as context:
        return _behind(command, context, words, last)


def _behind(command: PrefixCommand, context: click.Context, words: Sequence[str], last: str) -> Items:
    """Return the words that `last` may become, if `words` stand between it and the command."""
    options = command.options(context)
    typed, rest = command.written_out(words, options)
    goes_on = command.context_settings.get("allow_interspersed_args", True)
    while rest and goes_on:  # options may follow an argument
        more, rest = command.written_out(rest[1:], options)
        typed += more or [Typed("", ["="], "")]
    hostfile = next((one.value for one in reversed(typed) if one.name == "--hostfile"), None)
    if rest:  # the words left are the script's own arguments
        return [CompletionItem(last, type=_FILE)]
    waiting = options.get(typed[-1].name) if typed and not typed[-1].has_value else None
    if waiting is not None and not waiting.is_flag:
        return _values(waiting, context, last, hostfile)
    if last[:1] != "-":
        arguments = (one for one in command.get_params(context) if isinstance(one, click.Argument))
        return [item for one in [*arguments][:1] for item in _values(one, context, last, hostfile)]
    name, equals, value = last.partition("=")
    if not equals:
        return [
            CompletionItem(name, help=(option.help or "").partition("  [")[0].partition(". ")[0].rstrip(".:"))
            for name, option in sorted(options.items())
            if name.startswith(last) and name.startswith("--")
        ]
    ((written, *_), _) = command.written_out([last], options)
    items = _values(options[written.name], context, value, hostfile)
    return [CompletionItem(f"{name}={one.value}", type=one.type, of_option=True) for one in items]


def _values(parameter: click.Parameter, context: click.Context, start: str, hostfile: str | None) -> Items:
    """Return the values that begin with `start`."""
    metavar = parameter.metavar or (parameter.name or "").upper()
    if metavar in _OF_METAVAR:
        return [CompletionItem(start, type=_OF_METAVAR[metavar])]
    if metavar == "HOSTS":
        return [CompletionItem(one) for one in _hosts(start, hostfile)]
    if metavar == "[JOB]":
        from ..registry.known_jobs import exact_names, known_jobs

        names = exact_names(known_jobs()).values()
        return [CompletionItem(one) for one in reversed([*names]) if one.startswith(start)]
    return parameter.shell_complete(context, start)


def _hosts(start: str, hostfile: str | None) -> Iterator[str]:
    """Yield the hosts of the hostfile, else of the default one. Slots of a host are not offered."""
    from ..run.host_pool import named_hosts

    before, at, last = start.rpartition("@")
    path = hostfile and os.path.expandvars(os.path.expanduser(hostfile))
    if ":" in last.rpartition("]")[2] or path == "-":
        return
    named = named_hosts(Options(program="", hostfile=path))
    taken = {one.partition(":")[0] for one in before.split("@")}
    for host in () if named is None else named.hosts:
        name = f"[{host.name}]" if is_ipv6(host.name) else host.name
        if name.startswith(last) and name not in taken:
            yield f"{before}{at}{name}"


def _paths(start: str, kind: str) -> Items:
    """Return files and folders, or folders alone, where the shell does not look for them itself."""
    folder, slash, name = start.rpartition("/")
    with os.scandir(os.path.expanduser(folder + slash) or ".") as entries:
        found = [
            f"{folder}{slash}{one.name}{'/' if one.is_dir() else ''}"
            for one in entries
            if one.name.startswith(name) and (name or one.name[0] != ".") and (kind == _FILE or one.is_dir())
        ]
    return [CompletionItem(one) for one in sorted(found)]
