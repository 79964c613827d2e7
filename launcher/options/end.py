"""What is told of the end of a job, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from ..errors import LaunchError

SECRET = "--webhook"  # of which a URL often has one in it


class EndOptions(NamedTuple):
    """None means not given."""

    command: str | None = None
    webhook: str | None = None

    @property
    def is_on(self) -> bool:
        return self.command is not None or self.webhook is not None

    def refuse(self, why: str) -> None:
        """Errors: LaunchError if something was asked for where the end of the whole job is not known"""
        for option, given in (("--on_end", self.command), ("--webhook", self.webhook)):
            if given is not None:
                raise LaunchError(f"{option} has no effect with {why}; leave it out")


def _url(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An address of http or https. What is wrong with it is said without showing it."""
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not value.isascii() or not value.isprintable() or " " in value:
        raise click.BadParameter(
            "this is no URL of http or https; give e.g. https://example.com/hooks/1, with other characters "
            "than letters, digits and punctuation as %XX"
        )
    return value


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--on_end"],
        metavar="COMMAND",
        help="Run this in a shell here when the job has ended; it gets how on standard input, as JSON.",
    ),
    click.Option(
        ["--webhook"],
        metavar="URL",
        callback=_url,
        help="Send the same JSON there, by POST.",
    ),
)


def read(given: dict[str, Any]) -> EndOptions:
    """The options of this file from all that were given, by parameter name."""
    return EndOptions(command=given["on_end"], webhook=given["webhook"])


def shown_url(url: str) -> str:
    """Who is asked, without what may be a secret: user, path and query."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}"


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line as others may see it."""
    found, is_next = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if is_next:
            word = _hidden(word)
        elif equals and _is_secret(name):
            word = f"{name}={_hidden(value)}"
        is_next = not is_next and not equals and _is_secret(word)
        found.append(word)
    return found


def _is_secret(name: str) -> bool:
    """As the command line takes it: in one of its spellings, or shortened."""
    plain = name.replace("-", "_")
    return len(plain) > len("__") and "__webhook".startswith(plain)


def _hidden(url: str) -> str:
    try:
        return f"{shown_url(url)}/..." if "://" in url else url
    except ValueError:
        return "..."
