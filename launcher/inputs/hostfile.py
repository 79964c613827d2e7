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
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from .env_file import EnvEntry, value_parts
from .host import KEYS, Host, Pairs, host_key, hosts_named, is_ipv6, slots_of_both, spelled, unknown_key
from .named_file import read_named, read_stdin

__all__ = ["Host", "host_key", "is_ipv6", "parse_hostfile", "read_hostfile", "read_piped_hostfile"]

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
    target: str = "worker-1"  # shown in the error's example

    @property
    def where(self) -> str:
        return f"{self.source}:{self.number}"

    def refusal(self, why: str, *, example: Pairs, key: str = "", name: str = "") -> LaunchError:
        text = _SECRET.sub(r"\1...", self.text)  # values may be secrets
        text = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
        line = " ".join([name or self.target, *(f"{one}={value}" for one, value in example)])
        return LaunchError(f"{self.where}: {text!r}: {why}; write e.g. {line!r}")


def read_hostfile(path: Path, *, warn: Callable[[str], object] = lambda text: None) -> tuple[Host, ...]:
    """Return the hosts that the file names.

    Errors: LaunchError if the file is missing, cannot be read, is not UTF-8 text, or as parse_hostfile().
    """
    try:
        text = read_named(path).decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(
            f"{path}: this hostfile cannot be read ({error.strerror}); give --hostfile "
            "the path of a text file, or a list such as 'node[1-4]:8'"
        ) from error
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"{path}: not text (byte {error.start} is not UTF-8); "
            "a hostfile is UTF-8 text with one host per line; write e.g. 'worker-1 slots=8'"
        ) from error
    if path.suffix.lower() in YAML_SUFFIXES:
        from .hostfile_yaml import parse_yaml_hostfile

        return parse_yaml_hostfile(text, source=str(path), warn=warn)
    return parse_hostfile(text, source=str(path), warn=warn)


def read_piped_hostfile(*, warn: Callable[[str], object] = lambda text: None) -> tuple[Host, ...]:
    """Return the hosts that are named on standard input, for which `--hostfile -` stands.

    Errors: LaunchError if it is empty, if it is not UTF-8 text, or as parse_hostfile().
    """
    how = "pipe a hostfile into it: sed 's/$/ slots=8/' nodes | dslaunch --hostfile - ..."
    try:
        text = read_stdin().decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile -: standard input cannot be read ({error.strerror}); {how}") from error
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"--hostfile -: standard input is not text (byte {error.start} is not UTF-8); {how}"
        ) from error
    return parse_hostfile(text, source="standard input", warn=warn)


def parse_hostfile(
    text: str, *, source: str, warn: Callable[[str], object] = lambda text: None
) -> tuple[Host, ...]:
    """Return the hosts that a hostfile's text names, in its order.

    `warn` gets text that has no effect. A line that DeepSpeed reads, `NAME slots=N` with anything after it,
    means the same here: slots=0 leaves the host out, and words that are not a key of dslaunch, nor similar
    to one, are skipped.
    Errors: LaunchError with `source`, the line's number and the line; or if no host is named at all.
    Source: DeepSpeed 0.19.8 launcher/runner.py, `_parse_hostfile`. The exception is `slots=2x`, which
    DeepSpeed reads as 2.
    """
    hosts: list[Host] = []
    line_of: dict[str, tuple[int, Host]] = {}  # names that differ in case are two hosts, as for DeepSpeed
    num_lines = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _Line(source=source, number=number, text=raw.strip())
        words = _split(raw, line)
        if not words:
            continue
        num_lines += 1
        line = line._replace(target=words[0])
        found = _parse_line(line, _without_comment(words[1:], line, warn), warn)
        for host in found:
            first = line_of.get(spelled(host.name))
            if first is not None:
                raise line.refusal(
                    f"host {host.name!r} is on line {first[0]} already, and a host has one "
                    "line for all its slots; leave one of them out",
                    example=slots_of_both(first[1], host),
                    name=_target_of(host, has_user="@" in line.target),
                )
        line_of.update((spelled(host.name), (number, host)) for host in found)
        hosts += found
    if not hosts and num_lines:
        raise LaunchError(
            f"{source}: every host in it has slots=0, so none can take part; write e.g. slots=8 for one"
        )
    if not hosts:
        raise LaunchError(
            f"{source}: no host in it, only blank lines and comments; "
            "a hostfile has one line per host; write e.g. 'worker-1 slots=8'"
        )
    return tuple(hosts)


def _split(raw: str, line: _Line) -> list[str]:
    """Split a line without its comment. In key='a b' and key="a b" the quotes belong to the word."""
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
                "a quote does not close, or text follows the closing one; a value that begins with a quote "
                "is quoted as a whole",
                name=words[0] if words else "",
                example=(("slots", "8"), ("cwd", "'/data/my job'")),
            )
        words.append(match[0])
        end = match.end()


def _target_of(host: Host, *, has_user: bool) -> str:
    name = f"[{host.name}]" if is_ipv6(host.name) else host.name
    return f"{host.user}@{name}" if has_user else name


def _without_comment(options: list[str], line: _Line, warn: Callable[[str], object]) -> list[str]:
    """Remove a comment that follows a value without a blank, as DeepSpeed reads `slots=2#comment`."""
    if options and (match := re.fullmatch(r"(slots=[0-9]+)(#.*)", options[0])):
        comment = " ".join([match[2], *options[1:]])
        warn(
            f"{line.where}: {comment[:_SHOWN_LENGTH]!r} is read as a comment, as with DeepSpeed; write a "
            "space before '#'"
        )
        return [match[1]]
    return options


def _parse_line(line: _Line, options: list[str], warn: Callable[[str], object]) -> tuple[Host, ...]:
    if "=" in line.target:
        raise line._replace(target="worker-1").refusal(
            "a line begins with the host's name", example=(("slots", "8"),)
        )
    values: dict[str, str] = {}
    env: list[EnvEntry] = []
    for word, following in pairwise([line.target, *options]):
        if following.startswith("=") or (word.find("=") == len(word) - 1 and "=" not in following):
            raise line.refusal("no space may stand around '='", example=(("slots", "8"),))
    is_as_deepspeed = bool(options) and re.fullmatch(r"slots=[0-9]+", options[0]) is not None
    unread = [one for one in options if not _is_ours(one)] if is_as_deepspeed else []
    # Keys that only dslaunch has show that the line was not written for DeepSpeed
    if unread and len(unread) == len(options) - 1:
        why = "has no effect, as with DeepSpeed; leave it out"
        warn(f"{line.where}: {' '.join(unread)!r} {why}{_keys(unread)}")
        options = options[:1]
    if is_as_deepspeed and not int(options[0].partition("=")[2][:9]):
        warn(f"{line.where}: {line.target} has slots=0 and takes no part")
        return ()
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


def _keys(unread: list[str]) -> str:
    """Return text on the keys that are allowed besides slots; empty if the words are those of Open MPI's
    hostfiles.
    """
    if all(one.startswith(("max_slots", "max-slots")) for one in unread):
        return ""
    return f", or write a key that has one: {', '.join(KEYS)}, env.NAME"


def _is_ours(option: str) -> bool:
    """Tell whether the option is a key of dslaunch, or so similar to one that it must be refused as a typing
    mistake.
    """
    key, equals, _ = option.partition("=")
    if key in KEYS or key.startswith("env."):
        return True
    if not equals or key in ("max_slots", "max-slots"):  # max_slots and max-slots are keys of Open MPI
        return False
    import difflib

    return bool(difflib.get_close_matches(key.lower(), KEYS, n=1))


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
    """Return a value without its quotes; only for keys other than env.NAME, because nothing expands in it."""
    if not value.startswith(("'", '"')):
        return value
    return "".join(
        piece[1] if piece[2] is None else re.sub(r'\\(["\\$`])', r"\1", piece[2])
        for piece in _PIECE.finditer(value)
    )
