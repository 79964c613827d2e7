"""The hosts a job may use: one line per host or range, in the order in which nodes get their ranks.

# name, [address] or user@name    then key=value in any order
worker-1             slots=8
ada@worker-2         slots=4 port=2222
[fd00::7]            devices=0,2
node[01-16]          slots=auto cwd=/data/job env.NCCL_SOCKET_IFNAME=ib0 env.NOTE='two words'

A file whose name ends in .yaml or .yml says the same in YAML: see hostfile_yaml.py.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from .environment import EnvEntry, value_parts
from .errors import LaunchError
from .host import KEYS, Host, Pairs, host_key, hosts_named, is_ipv6, unknown_key

__all__ = ["Host", "host_key", "is_ipv6", "parse_hostfile", "read_hostfile"]

YAML_SUFFIXES = (".yaml", ".yml")

_QUOTED = r"""(?:'[^']*'|"(?:[^"\\]|\\.)*")+"""
_PIECE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)\"""")
_WORD = re.compile(rf"""(?:[^\s=#][^\s=]*)?=(?:{_QUOTED}(?!\S)|(?!['"])\S*)|[^\s=]+(?!\S)""")
_ENV = re.compile(r"env\.([A-Za-z_][A-Za-z0-9_]*)")
_SECRET = re.compile(r"((?:^|\s)env\.[^\s=]*=).+", re.DOTALL)
_SHOWN_LENGTH = 120


class _Line(NamedTuple):
    """One line of a hostfile, as errors quote it."""

    source: str
    number: int
    text: str
    target: str = "worker-1"  # for the example

    @property
    def where(self) -> str:
        return f"{self.source}:{self.number}"

    def refusal(self, why: str, *, example: Pairs, key: str = "", name: str = "") -> LaunchError:
        text = _SECRET.sub(r"\1...", self.text)  # values may be secrets
        text = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
        line = " ".join([name or self.target, *(f"{one}={value}" for one, value in example)])
        return LaunchError(f"{self.where}: {text!r}: {why}; write e.g. {line!r}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts that the file names.

    Errors: LaunchError if the file is missing, cannot be read, is not UTF-8 text, or as parse_hostfile().
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(
            f"{path}: this hostfile cannot be read ({error.strerror}); give --hostfile the path of a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"{path}: not text (byte {error.start} is not UTF-8); "
            "a hostfile is UTF-8 text with one host per line; write e.g. 'worker-1 slots=8'"
        ) from error
    if path.suffix.lower() in YAML_SUFFIXES:
        from .hostfile_yaml import parse_yaml_hostfile  # here: most hostfiles do without PyYAML (15 ms)

        return parse_yaml_hostfile(text, source=str(path))
    return parse_hostfile(text, source=str(path))


def parse_hostfile(text: str, *, source: str) -> tuple[Host, ...]:
    """The hosts that a hostfile's text names, in its order.

    Text after the slots that DeepSpeed would skip is refused: a word that has no effect is a mistake.
    Errors: LaunchError with `source`, the line's number and the line; or that no host is named at all.
    Source: DeepSpeed 0.19.6 launcher/runner.py, `_parse_hostfile`; every line that works there and has no such text.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}  # by host_key()
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _Line(source=source, number=number, text=raw.strip())
        words = _split(raw, line)
        if not words:
            continue
        line = line._replace(target=words[0])
        found = _parse_line(line, words[1:])
        for host in found:
            first = line_of.get(host_key(host.name))
            if first is not None:
                raise line.refusal(
                    f"host {host.name!r} is on line {first} already, and a host has one line for all its slots "
                    "(upper and lower case are the same name)",
                    example=(("slots", str(host.slots or "auto")),),
                )
        line_of.update((host_key(host.name), number) for host in found)
        hosts += found
    if not hosts:
        raise LaunchError(
            f"{source}: no host in it, only blank lines and comments; "
            "a hostfile has one line per host; write e.g. 'worker-1 slots=8'"
        )
    return tuple(hosts)


def _split(raw: str, line: _Line) -> list[str]:
    """The words of a line without its comment. In key='a b' and key="a b" the quotes belong to the word."""
    words: list[str] = []
    end = 0
    while True:
        rest = raw[end:].lstrip()
        if not rest or rest.startswith("#"):
            return words
        start = len(raw) - len(rest)
        match = _WORD.match(raw, start)
        if match is None or (match.end() < len(raw) and not raw[match.end()].isspace()):
            raise line.refusal(
                "a quote does not close, or text follows the closing one; a value that begins with a quote is quoted "
                "as a whole",
                name=words[0] if words else "",
                example=(("slots", "8"), ("cwd", "'/data/my job'")),
            )
        words.append(match[0])
        end = match.end()


def _parse_line(line: _Line, options: list[str]) -> tuple[Host, ...]:
    if "=" in line.target:
        raise line._replace(target="worker-1").refusal(
            "a line begins with the host's name", example=(("slots", "8"),)
        )
    values: dict[str, str] = {}
    env: list[EnvEntry] = []
    for word, following in pairwise([line.target, *options]):
        if following.startswith("=") or (word.find("=") == len(word) - 1 and "=" not in following):
            raise line.refusal("no space may stand around '='", example=(("slots", "8"),))
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            why = f"after the host's name only key=value may stand, and {option!r} is not"
            raise line.refusal(why, example=(("slots", "8"),))
        if key.startswith("env."):
            env.append(_parse_env(line, key, value, env))
            continue
        if key not in KEYS:
            raise unknown_key(key, given=values, place=line)
        if key in values:
            raise line.refusal(f"{key} is given twice", example=((key, value),))
        values[key] = _unquote(value)
    return hosts_named(line.target, values, tuple(env), place=line)


def _parse_env(line: _Line, key: str, value: str, before: list[EnvEntry]) -> EnvEntry:
    match = _ENV.fullmatch(key)
    if match is None:
        raise line.refusal(
            f"{key!r}: after 'env.' stands a variable's name, made of letters, digits and '_'",
            example=(("slots", "8"), ("env.NCCL_DEBUG", "INFO")),
        )
    if any(entry.name == match[1] for entry in before):
        raise line.refusal(f"{key} is given twice", example=(("slots", "8"), ("env.NCCL_DEBUG", "INFO")))
    return EnvEntry(
        name=match[1], value=value_parts(value, name=match[1], where=line.where), source=line.where
    )


def _unquote(value: str) -> str:
    """The text of a value other than a variable's: nothing expands in it."""
    if not value.startswith(("'", '"')):
        return value
    return "".join(
        piece[1] if piece[2] is None else re.sub(r'\\(["\\$`])', r"\1", piece[2])
        for piece in _PIECE.finditer(value)
    )
