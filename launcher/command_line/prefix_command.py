"""A click command whose long options may be shortened, as argparse allows and existing scripts do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..options.option import JobOption

PROFILE = "--profile"
PLACES = ("FILE", "DIR", "FOLDER")  # placeholders of options with a path
# Settings of every command; then those of commands whose last argument is a program with its own arguments.
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
PROGRAM_SETTINGS = {**SETTINGS, "allow_interspersed_args": False}

Groups = Mapping[str, tuple[str, ...]]


class Typed(NamedTuple):
    """One option as it was typed, its name in full."""

    name: str
    words: list[str]
    value: str

    @property
    def has_value(self) -> bool:
        """Tell whether a value was typed, an empty one included."""
        return len(self.words) > 1 or "=" in self.words[0]


def _show_help(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(context.get_help(), color=context.color)
        context.exit()


def option_records(ctx: click.Context, command: click.Command) -> dict[str, tuple[str, str]]:
    """Return each option as the user writes it, with its help, by parameter name; arguments are left out,
    the usage shows them.
    """
    records = {}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
            records[parameter.name or ""] = record
    return records


def write_groups(
    formatter: click.HelpFormatter, records: Mapping[str, tuple[str, str]], groups: Groups
) -> None:
    """Write each title with the options below it."""
    for title, names in groups.items():
        with formatter.section(title):
            formatter.write_dl([records[name] for name in names])


def _may_be_empty(option: click.Option) -> bool:
    return isinstance(option, JobOption) and option.may_be_empty


def _without_empty(
    typed: list[Typed], options: Mapping[str, click.Option], *, in_file: frozenset[str] = frozenset()
) -> list[Typed]:
    """Drop options with an empty value, which take back a line of a file; `in_file` holds the parameter
    names of the options that the file gives.

    Errors: click.UsageError for an option without a value that takes nothing back, and for a value that is
    the next option
    """
    left = []
    for one in typed:
        option = options.get(one.name)
        if option is not None:
            _refuse_value(one, option, options)
        if option is None or one.value or not one.has_value or _may_be_empty(option):
            left.append(one)
        elif option.name not in in_file:
            raise click.UsageError(
                f"{one.name} is empty; give it a value ({option.metavar}), or leave it out; is a variable of "
                "your shell not set?"
            )
    return left


def _with_next(one: Typed, options: Mapping[str, click.Option], rest: list[str]) -> Typed:
    """Return the option with the first word of `rest`, which is taken from there, if the word belongs to its
    value and is no option itself.
    """
    option = options.get(one.name)
    is_alone = not isinstance(option, JobOption) or not one.value or not option.takes_next(one.value)
    if is_alone or not rest or rest[0].startswith("-"):
        return one
    value = f"{one.value} {rest.pop(0)}"
    return Typed(one.name, [one.name, value], value)


def _refuse_value(one: Typed, option: click.Option, options: Mapping[str, click.Option]) -> None:
    """Errors: click.UsageError for a value that was meant as something else: the next option, the end of the
    options, or a stream
    """
    if len(one.words) > 1 and not _may_be_empty(option):
        name = one.value.partition("=")[0]
        if one.value == "--" or name in options or name.replace("-", "_").replace("__", "--", 1) in options:
            raise click.UsageError(
                f"{one.name} is followed by {one.value[:80]}, which is no value; write {one.name} "
                f"{option.metavar}, or {one.name}={one.value[:80]} if that is meant"
            )
    takes_stream = isinstance(option, JobOption) and option.takes_stream
    if one.value == "-" and option.metavar in PLACES and not takes_stream:
        raise click.UsageError(
            f"{one.name} takes no stream, for which - stands; give a path, ./- for a file of that name"
        )


class PrefixCommand(click.Command):
    """Accepts `--num_n 2` for `--num_nodes 2`, and `--num-nodes` too.

    An ambiguous or unknown option is refused with a hint.

    `absent`: options of other launchers that this command does not have, each with its replacement. `groups`:
    titles and the parameter names below them, in the order of --help, which shows only these; without
    `groups`, all options stand below one title.
    """

    def __init__(
        self,
        *args: Any,
        absent: Mapping[str, str] | None = None,
        groups: Groups | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._absent = absent or {}
        self._groups = groups
        self._own_help: click.Option | None = None

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return click's option, without looking for a translation of its text: that takes 2 ms."""
        if self._own_help is None:
            self._own_help = click.Option(
                self.get_help_option_names(ctx),
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_help,
                help="Show this message and exit.",
            )
        return self._own_help

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, as wide as the terminal."""
        from .help_screen import help_of

        return help_of(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every option below its group's title."""
        records = option_records(ctx, self)
        write_groups(
            formatter, records, {"Options": tuple(records)} if self._groups is None else self._groups
        )

    def options(self, ctx: click.Context) -> dict[str, click.Option]:
        """Return the command's options, by each of their names."""
        return {
            name: parameter
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return self._parse(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click does not always name the command of a mistake
            raise

    def _parse(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = self.options(ctx)
        typed, rest = self.written_out(args, options)
        files = [one for one in typed if one.name == PROFILE]
        if not files:
            typed = _without_empty(typed, options)
            return super().parse_args(ctx, [word for one in typed for word in one.words] + rest)
        return self._parse_with_profile(ctx, files, typed, rest, options)

    def _parse_with_profile(
        self,
        ctx: click.Context,
        files: list[Typed],
        typed: list[Typed],
        rest: list[str],
        options: dict[str, click.Option],
    ) -> list[str]:
        if len(files) > 1 or not files[0].value:
            raise click.UsageError(
                f"{PROFILE} takes one file, and stands once; write e.g. {PROFILE} job.yaml"
            )
        from ..inputs.profile import read_profile

        names = frozenset(options[one.name].name or "" for one in typed if one.name in options)
        added = read_profile(Path(files[0].value), options, typed=names)
        typed = _without_empty(typed, options, in_file=added.replaced)
        words = [*added.options, *(word for one in typed if one.name != PROFILE for word in one.words)]
        try:
            return super().parse_args(ctx, words + (rest if rest not in ([], ["--"]) else [*added.script]))
        except click.UsageError as error:
            from .mistakes import in_our_words

            message = f"{in_our_words(error)} (with the options of {files[0].value})"
            raise click.UsageError(message, ctx=ctx) from None

    def written_out(
        self, args: Sequence[str], options: Mapping[str, click.Option]
    ) -> tuple[list[Typed], list[str]]:
        """Return the options in full, up to the first word that is not an option or an option's value; then
        the rest.

        Errors: click.UsageError for an unknown option
        """
        typed: list[Typed] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            word, equals, value = rest.pop(0).partition("=")
            if word.startswith("--"):
                name = self._full_name(word.replace("-", "_").replace("__", "--", 1), options)
                typed.append(Typed(name, [name + equals + value], value))
                takes_next = not equals and not options[name].is_flag
            else:
                letters, takes_next = self._split_short(word + equals + value, options)
                typed += letters
            if takes_next and rest:
                value = rest.pop(0)
                typed[-1] = Typed(typed[-1].name, [*typed[-1].words, value], value)
            typed[-1] = _with_next(typed[-1], options, rest)
        return typed, rest

    def _split_short(self, word: str, options: Mapping[str, click.Option]) -> tuple[list[Typed], bool]:
        """Split `-qHfile` or `-qH=file` as `-q -H file`; tell whether the last value is yet to come."""
        typed: list[Typed] = []
        letters = word[1:]
        while letters:
            option, letters = options.get("-" + letters[0]), letters[1:]
            if option is None:
                raise self._no_short(word, options)
            # Write the option in full: click would first take the short one for a long one and search for
            # similar names, which takes 2 ms.
            name = next((one for one in option.opts if one.startswith("--")), option.opts[0])
            if letters and not option.is_flag:
                value = letters.removeprefix("=")
                return [*typed, Typed(name, [name, value], value)], False
            typed.append(Typed(name, [name], ""))
            if not letters:
                return typed, not option.is_flag
        return [Typed(word, [word], "")], False

    def _no_short(self, word: str, options: Mapping[str, click.Option]) -> click.UsageError:
        """Return the error for a word with one dash, with other launchers' meaning of the word or a similar
        long name.
        """
        name = word.partition("=")[0]
        if name in self._absent:
            return click.UsageError(f"there is no option {name}: {self._absent[name]}")
        if name == "-":
            return click.UsageError(f"{word[:80]!r} is no option; see --help for the list")
        if (flag := options.get(name)) is not None and flag.is_flag:
            return click.UsageError(f"{name} takes no value, and {word[:80]!r} gives it one; write {name}")
        import difflib

        names = [one for one in options if one.startswith("--")]
        close = difflib.get_close_matches("-" + name.replace("-", "_").replace("_", "-", 1), names, n=2)
        close = close or sorted(
            {one for one in options if len(one) == 2 and one[1].lower() == name[1].lower()}
        )
        return click.UsageError(
            f"there is no option {name}; did you mean {' or '.join(close or ['--help for the list'])}?"
        )

    def _full_name(self, word: str, options: Mapping[str, click.Option]) -> str:
        if word in options:
            return word
        if word == "--":
            raise click.UsageError("'--=' is no option; see --help for the list")
        names = [name for name in options if name.startswith(word)]
        if len({options[name].name for name in names}) == 1:
            return names[0]
        if names:
            raise click.UsageError(f"{word} is ambiguous: it may be {' or '.join(sorted(names))}")
        for name in self._absent:
            if name.startswith(word):
                raise click.UsageError(f"there is no option {name}: {self._absent[name]}")
        import difflib

        close = difflib.get_close_matches(word, [name for name in options if name.startswith("--")], n=3) or [
            "--help for the list"
        ]
        raise click.UsageError(f"there is no option {word}; did you mean {' or '.join(close)}?")
