"""Text for the user: cleaned, shortened, with units."""

from __future__ import annotations

import re

MAX_TEXT = 4000  # characters of a message that are shown
_TERMINAL = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)")  # whole sequences


def cleaned(text: str, max_length: int = MAX_TEXT) -> str:
    """Return text of another source on one line, without signs that would steer a terminal: every shown text
    goes through here.

    A line end or tab becomes a space, a whole sequence such as a color is dropped, anything else that cannot
    be printed becomes `?`.
    """
    if not text.isprintable():
        text = _TERMINAL.sub("", text[: 2 * max_length])
        text = "".join(one if _is_harmless(one) else " " if one in "\t\n\v\f\r" else "?" for one in text)
    return text[:max_length] + "..." if len(text) > max_length else text


def _is_harmless(one: str) -> bool:
    """Tell whether it may be shown: also bytes that are no UTF-8, as in the name of a file, but no control
    characters.
    """
    return one.isprintable() or "\udca0" <= one <= "\udcff"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown_size(num_bytes: int) -> str:
    """Write a size with three digits or so: `503 GiB`, `1.5 GiB`, `64 MiB`."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    value, place = float(num_bytes), 0
    while value >= 1000 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:.1f} {units[place]}" if place and value < 10 else f"{value:.0f} {units[place]}"


def shown_time(seconds: float) -> str:
    """Write a time with two or three digits: `0.8 s`, `38 s`, `12 min 5 s`, `3 h 2 min`."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"


def wrapped(text: str, num_columns: int, *, first: int = 0) -> str:
    """Break the text between its words, so that a terminal breaks none of them; a longer word stays whole.

    Units: columns; the first line has `first` columns less, the following lines are indented by four
    """
    lines = text.split("\n")
    if all(len(line) + first <= num_columns for line in lines):
        return text
    from textwrap import TextWrapper

    wrapper = TextWrapper(
        width=num_columns,
        initial_indent=" " * first,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(wrapper.fill(line) for line in lines)[first:]


def shown_ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
