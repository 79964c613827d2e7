"""`dslaunch completion`: the lines that make a shell complete options and commands."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from shlex import quote
from typing import Any, NamedTuple

import click

from .cli import COMMANDS, dslaunch
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Put one of these lines into the file that your shell reads at its start:
  ~/.bashrc                    eval "$(dslaunch completion bash)"
  ~/.zshrc, behind compinit    eval "$(dslaunch completion zsh)"
  ~/.config/fish/config.fish   dslaunch completion fish | source
"""


class _Words(NamedTuple):
    """What can stand behind `dslaunch NAME`, or behind `dslaunch` alone if the name is empty."""

    name: str
    commands: tuple[str, ...]
    options: tuple[click.Option, ...]

    @property
    def spellings(self) -> list[str]:
        return sorted(
            name for one in self.options for name in (*one.opts, *one.secondary_opts) if name[:2] == "--"
        )


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(**given: Any) -> int:
    """Print what makes SHELL complete the options and commands of dslaunch: bash, zsh or fish."""
    known = list(_known())
    click.echo(_fish(known) if given["shell"] == "fish" else _bash(known, is_zsh=given["shell"] == "zsh"))
    return 0


def _known() -> Iterator[_Words]:
    yield _words("", dslaunch, tuple(COMMANDS))
    for name, module in COMMANDS.items():
        found: click.Command = import_module(module, __package__).command
        yield _words(name, found, tuple(found.commands) if isinstance(found, click.Group) else ())


def _words(name: str, found: click.Command, commands: tuple[str, ...]) -> _Words:
    each = [found, *(found.commands.values() if isinstance(found, click.Group) else ())]
    options: dict[str, click.Option] = {}
    for one in each:
        with click.Context(one, info_name=one.name) as context:
            options |= {
                option.opts[-1]: option
                for option in one.get_params(context)
                if isinstance(option, click.Option)
            }
    return _Words(name, commands, tuple(options.values()))


def _values(option: click.Option) -> str:
    return " ".join(option.type.choices) if isinstance(option.type, click.Choice) else ""


def _bash(known: list[_Words], *, is_zsh: bool) -> str:
    cases = [
        f"    {one.name or '*'}) options={quote(' '.join(one.spellings))} ;;"
        for one in (*known[1:], known[0])
    ]
    cases_of_commands = [
        f'        {one.name}) COMPREPLY=($(compgen -W {quote(" ".join(one.commands))} -- "$word")) ;;'
        for one in known[1:]
        if one.commands
    ]
    values = {
        name: _values(one) for words in known for one in words.options for name in one.opts if _values(one)
    }
    cases_of_values = [
        f'    {name}) COMPREPLY=($(compgen -W {quote(text)} -- "$word")); return ;;'
        for name, text in values.items()
    ]
    lines = [
        "autoload -U +X bashcompinit && bashcompinit" if is_zsh else "",
        "_dslaunch() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" options',
        "    COMPREPLY=()",
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        '    case "$before" in',
        *cases_of_values,
        "    esac",
        '    case "$word" in',
        '    -*) COMPREPLY=($(compgen -W "$options" -- "$word")); return ;;',
        "    esac",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        (
            f'        COMPREPLY=($(compgen -W {quote(" ".join(known[0].commands))} -- "$word") '
            '$(compgen -f -- "$word"))'
        ),
        '    elif [ "$COMP_CWORD" -eq 2 ]; then',
        '        case "${COMP_WORDS[1]}" in',
        *cases_of_commands,
        "        esac",
        "    fi",
        "}",
        "complete -o default -F _dslaunch dslaunch",
    ]
    return "\n".join(filter(None, lines))


def _fish(known: list[_Words]) -> str:
    names = " ".join(known[0].commands)
    lines = [f"complete -c dslaunch -n __fish_use_subcommand -a {quote(names)}"]
    for words in known:
        where = (
            f"__fish_seen_subcommand_from {words.name}"
            if words.name
            else f"not __fish_seen_subcommand_from {names}"
        )
        if words.commands and words.name:
            lines.append(f"complete -c dslaunch -f -n {quote(where)} -a {quote(' '.join(words.commands))}")
        lines += [f"complete -c dslaunch -n {quote(where)} {_fish_option(one)}" for one in words.options]
    return "\n".join(lines)


def _fish_option(option: click.Option) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.opts]
    if not option.is_flag:
        parts.append(f"-x -a {quote(_values(option))}" if _values(option) else "-r")
    return " ".join([*parts, f"-d {quote((option.help or '').split('. ')[0].rstrip('.'))}"])
