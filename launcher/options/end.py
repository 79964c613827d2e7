"""Reports of the end of a job, and their receivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from .option import option, record

SECRET = "--webhook"  # its value is hidden, because a URL often has a secret in it


def _url(value: str) -> str:
    """Read an address of http or https. Errors do not show it."""
    try:
        parts = urlsplit(value)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(
            "this is no URL of http or https; give e.g. https://example.com/hooks/1, with other characters "
            "than letters, digits and punctuation as %XX"
        )
    return value


@record
class EndOptions(NamedTuple):
    """None means not given."""

    command: str | None = option(
        "--on_end",
        topic="output",
        metavar="COMMAND",
        help="Run this in a shell here when the job has ended; it gets how on standard input, as JSON.",
    )
    webhook: str | None = option(
        "--webhook",
        topic="output",
        read=_url,
        metavar="URL",
        help="Send the same JSON there, by POST.",
    )

    @property
    def is_on(self) -> bool:
        return self.command is not None or self.webhook is not None


def shown_url(url: str) -> str:
    """Return the address without parts that may be a secret: user, path and query."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}"


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets replaced, as others may see it."""
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
    """Tell whether `name` is --webhook on a command line, in one of its spellings or shortened."""
    plain = name.replace("-", "_")
    return len(plain) > len("__") and "__webhook".startswith(plain)


def _hidden(url: str) -> str:
    try:
        return f"{shown_url(url)}/..." if "://" in url else url
    except ValueError:
        return "..."
