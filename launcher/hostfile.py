"""The hosts a job may use: one line per host, in the order in which nodes get their ranks.

# name, [address] or user@name    then key=value in any order
worker-1             slots=8
ada@worker-2         slots=4 port=2222
[fd00::7]            slots=8
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from .errors import LaunchError

KEYS = ("slots", "port")
MAX_SLOTS = 4096  # far above any machine; a larger number is a slip that would start that many processes
MAX_PORT = 65535

_COMMENT = re.compile(r"(?:^|\s)#.*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_USER = re.compile(
    r"[A-Za-z0-9_.][A-Za-z0-9_.+$@\\-]*"
)  # '@' and '\' occur in names from a directory service
_RANGE = re.compile(r"\[[0-9,-]*\]|\{.*\}")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_SHOWN_LENGTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of the pool. Its place in the hostfile is its node rank."""

    name: (
        str  # as in the hostfile, without user and brackets: what include and exclude name, what output shows
    )
    slots: int
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    source: str
    number: int
    text: str

    def refusal(self, why: str, *, example: str) -> LaunchError:
        text = self.text if len(self.text) <= _SHOWN_LENGTH else self.text[:_SHOWN_LENGTH] + "..."
        return LaunchError(f"{self.source}:{self.number}: {text!r}: {why}; write e.g. {example!r}")


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
        words = _COMMENT.sub("", raw).split()
        if not words:
            continue
        line = _Line(source=source, number=number, text=raw.strip())
        host = _parse_host(line, words)
        first = line_of.setdefault(host_key(host.name), number)
        if first != number:
            raise line.refusal(
                f"host {host.name!r} is on line {first} already, and a host has one line for all its slots "
                "(upper and lower case are the same name)",
                example=f"{words[0]} slots={host.slots}",
            )
        hosts.append(host)
    if not hosts:
        raise LaunchError(
            f"{source}: no host in it, only blank lines and comments; "
            "a hostfile has one line per host; write e.g. 'worker-1 slots=8'"
        )
    return tuple(hosts)


def host_key(name: str) -> str:
    """What two spellings of one host's name share: names are compared without case, IPv6 addresses by value."""
    return str(IPv6Address(name)) if is_ipv6(name) else name.lower()


def is_ipv6(text: str) -> bool:
    """Whether `text` is an IPv6 address without brackets, with or without a zone as in `fe80::1%eth0`."""
    if ":" not in text or not _IPV6.fullmatch(text):
        return False
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _parse_host(line: _Line, words: list[str]) -> Host:
    target, *options = words
    user, name = _parse_target(line, target)
    joined = " ".join(words)
    if " =" in joined or "= " in joined:
        raise line.refusal("no space may stand around '='", example=f"{target} slots=8")
    values: dict[str, int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            why = f"after the host's name only key=value may stand, and {option!r} is not"
            raise line.refusal(why, example=f"{target} slots=8")
        if key not in KEYS:
            raise _unknown_key(line, key, given=joined, target=target)
        if key in values:
            raise line.refusal(f"{key} is given twice", example=f"{target} {option}")
        values[key] = _parse_number(line, key, value, target=target)
    if "slots" not in values:
        why = "slots=N is missing, the number of processes the host takes"
        raise line.refusal(why, example=" ".join([target, "slots=8", *options]))
    return Host(name=name, slots=values["slots"], user=user, port=values.get("port"))


def _parse_target(line: _Line, target: str) -> tuple[str | None, str]:
    if "=" in target:
        raise line.refusal("a line begins with the host's name", example="worker-1 slots=8")
    user, at, name = target.rpartition("@")
    if at and not _USER.fullmatch(user):
        why = "a user, before the last '@', is made of letters, digits and _.+-$@\\ and begins with none of +-$@\\"
        raise line.refusal(why, example="ada@worker-1 slots=8")
    address = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if is_ipv6(address):
        return user or None, address
    problem = _name_problem(name)
    if problem is not None:
        why, host = problem
        raise line.refusal(why, example=f"{user}{at}{host} slots=8")
    return user or None, name


def _name_problem(name: str) -> tuple[str, str] | None:
    """Why `name` cannot be a host's name, and a name to show instead; None if it can."""
    if _RANGE.search(name):
        return "ranges are not supported; write one line per host", "worker-1"
    if "[" in name or "]" in name:
        return "brackets may hold only an IPv6 address", "[fd00::7]"
    if ":" in name:
        before = name.partition(":")[0]
        why = "':' may stand only in an IPv6 address; slots are given as slots=N, an ssh port as port=N"
        return why, before if _NAME.fullmatch(before) else "[fd00::7]"
    if not _NAME.fullmatch(name):
        return "a host's name is made of letters, digits and .-_ and begins with none of .-", "worker-1"
    if "." in name and name.replace(".", "").isdigit():
        try:
            IPv4Address(name)
        except ValueError:
            return "an IPv4 address has four numbers from 0 to 255", "10.0.0.7"
    return None


def _unknown_key(line: _Line, key: str, *, given: str, target: str) -> LaunchError:
    left = [known for known in KEYS if f" {known}=" not in given]
    near = difflib.get_close_matches(key.lower(), left, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return line.refusal(
        f"unknown key {key!r}{hint}; allowed are slots=N and port=N", example=f"{target} slots=8 port=22"
    )


def _parse_number(line: _Line, key: str, text: str, *, target: str) -> int:
    most = MAX_SLOTS if key == "slots" else MAX_PORT
    digits = text.lstrip("0")
    if re.fullmatch("[0-9]{1,5}", digits) and int(digits) <= most:
        return int(digits)
    limit = "above 0" if key == "slots" and not re.fullmatch("[0-9]+", digits) else f"from 1 to {most}"
    example = f"{target} slots=8" if key == "slots" else f"{target} slots=8 port=22"
    raise line.refusal(f"{key} must be a whole number {limit}", example=example)
