"""A click command whose long options may be shortened, as argparse allows and existing scripts do."""

from __future__ import annotations

import difflib

import click


class PrefixCommand(click.Command):
    """Accepts `--num_n 2` for `--num_nodes 2`, and `--num-nodes` too. Ambiguous or unknown: refused with a hint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._complete(ctx, args))

    def _complete(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write out shortened options, up to the first word that is not an option or an option's value."""
        options = {
            name: parameter
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }
        done: list[str] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
            word, equals, value = rest.pop(0).partition("=")
            if word.startswith("--"):
                name = self._full_name(word.replace("-", "_").replace("__", "--", 1), options)
                done.append(name + equals + value)
                takes_next = not equals and not options[name].is_flag
            else:
                last, words = self._split_short(word + equals + value, options)
                done += words
                takes_next = last is not None and not last.is_flag
            if takes_next and rest:
                done.append(rest.pop(0))
        return done + rest

    def _split_short(
        self, word: str, options: dict[str, click.Option]
    ) -> tuple[click.Option | None, list[str]]:
        """`-qHfile` or `-qH=file` as `-q -H file`; the option is the last one if its value is yet to come."""
        words: list[str] = []
        letters = word[1:]
        while letters:
            name, letters = "-" + letters[0], letters[1:]
            option = options.get(name)
            if option is None:  # refused later, with the whole word
                return None, [word]
            words.append(name)
            if letters and not option.is_flag:
                return None, [*words, letters.removeprefix("=")]
            if not letters:
                return option, words
        return None, [word]

    def _full_name(self, word: str, options: dict[str, click.Option]) -> str:
        if word in options:
            return word
        names = [name for name in options if name.startswith(word)]
        if len({options[name].name for name in names}) == 1:
            return names[0]
        if names:
            raise click.UsageError(f"{word} is ambiguous: it may be {' or '.join(sorted(names))}")
        close = difflib.get_close_matches(word, [name for name in options if name.startswith("--")], n=3) or [
            "--help for the list"
        ]
        raise click.UsageError(f"there is no option {word}; did you mean {' or '.join(close)}?")
