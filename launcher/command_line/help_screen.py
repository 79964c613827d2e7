"""The help of a command at the width of the terminal, however narrow that is.

click's help has 50 columns at least, and breaks no line of an example.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size

import click

MIN_COLUMNS = 24
NARROW = 60  # columns below which a list has a shorter first column
# A line indented by so many columns is a sentence about the example above; its lines are one text
_SENTENCE = 6
_KEPT = "\b"  # the first line of a paragraph whose lines are kept
_LABELLED = re.compile(r"(\s*\S.*?\s{2,})\S")


class HelpScreen(click.HelpFormatter):
    """click's formatter, with all lines within the terminal."""

    def __init__(self, context: click.Context) -> None:
        columns = max(get_terminal_size().columns, MIN_COLUMNS)
        most = context.max_content_width or 80
        # click keeps two columns free on the right; in a narrow terminal they are needed
        super().__init__(width=min(columns, most) - 2 if columns > NARROW else columns)

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int | None = None, col_spacing: int = 2
    ) -> None:
        """Write names and their meanings. A name longer than the first column stands alone on its line."""
        widest = 30 if self.width > NARROW else self.width // 4
        pieces = [
            (one, does if one is names[-1] else "")
            for name, does in rows
            for names in [self._broken(name, subsequent_indent="    ")]
            for one in names
        ]
        super().write_dl(pieces, col_max=min(col_max or 30, widest), col_spacing=col_spacing)

    def write_heading(self, heading: str) -> None:
        """Write the title of a list."""
        self.write("".join(f"{line}\n" for line in self._broken(f"{' ' * self.current_indent}{heading}:")))

    def _broken(self, text: str, *, subsequent_indent: str = "") -> list[str]:
        return textwrap.wrap(
            text,
            self.width - self.current_indent,
            subsequent_indent=subsequent_indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def write_text(self, text: str) -> None:
        """Write paragraphs; those that begin with \\b keep their lines as far as these fit."""
        width = self.width - self.current_indent
        paragraphs = (one.strip("\n").split("\n") for one in re.split(r"\n\s*\n", text.strip("\n")))
        super().write_text(
            "\n\n".join(
                "\n".join([_KEPT, *fitted(lines[1:], width)] if lines[0].strip() == _KEPT else lines)
                for lines in paragraphs
            )
        )


def help_of(command: click.Command, context: click.Context) -> str:
    """Return the whole help."""
    screen = HelpScreen(context)
    command.format_help(context, screen)
    return "\n".join(line.rstrip() for line in screen.getvalue().rstrip("\n").split("\n"))


def fitted(lines: list[str], width: int) -> Iterator[str]:
    """Yield lines that are kept, those that are wider than `width` broken between words.

    After the first break of a command the lines end with a backslash, so that it can be copied.
    """
    if all(len(line) <= width for line in lines):
        yield from lines
        return
    for line in _joined(lines):
        is_command = line.lstrip().startswith("dslaunch ")
        label = _LABELLED.match(line)
        indent = len(line) - len(line.lstrip())
        hang = indent + 4 * (is_command or label is not None)
        if label is not None and label.end(1) <= width // 2:
            hang = label.end(1)
        broken = textwrap.wrap(
            line,
            width - 2 * is_command,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from (f"{one} \\" if is_command and one is not broken[-1] else one for one in broken)


def _joined(lines: list[str]) -> Iterator[str]:
    """Join each line with the lines below that continue it: those that begin where its text does."""
    pending, column = "", -1
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if pending and indent == column:
            pending += f" {line.lstrip()}"
            continue
        if pending:
            yield pending
        label = _LABELLED.match(line)
        column = label.end(1) if label else indent if indent >= _SENTENCE else -1
        pending = line
    if pending:
        yield pending
