"""Options for an `ssh` of the system, so that it refuses a changed host key, whatever its configuration says.

`StrictHostKeyChecking no` accepts a changed key. A host with that setting gets `accept-new` instead, which
accepts only an unknown key; other settings for unknown keys stay. The ssh that OpenSSH starts for a
ProxyJump gets none of our options, so if a jump host has that setting, we replace the ProxyJump by the
ProxyCommand that OpenSSH would make of it, with these options added.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import EXIT_HOST, LaunchError

ASK_WITHIN_S = 30.0  # `ssh -G` takes 10 ms, and the time of each `Match exec`
MAX_DEPTH = 8  # the most jump hosts that are themselves reached through jump hosts
STRICT = {"NoHostAuthenticationForLocalhost": "no"}  # for each ssh that is started
_TAKES_CHANGED = ("no", "off", "false")
_TAKES_NEW = ("-o", "StrictHostKeyChecking=accept-new")
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:/]+)(?::(?P<port>\d+))?/?")

Facts = Mapping[str, str]  # `ssh -G`: its keywords in lower case, and their values


class _Way(NamedTuple):
    """An `ssh -W` to a host, as a ProxyCommand. `is_needed`: otherwise a host on the way would accept a
    changed key.
    """

    command: str
    is_needed: bool


def strict_words(known: Facts, program: str, where: tuple[str, ...], config: str | None) -> tuple[str, ...]:
    """Return `where`, the words that name a host, with options in front that make ssh strict. `known` is
    ssh's configuration for these words; `config` is the file of -F, if one was given.

    Errors: LaunchError if ssh does not print its configuration
    """
    words = _TAKES_NEW if _takes_changed(known) else ()
    way = _way(program, known.get("proxyjump", "none"), config, depth=1)
    if way is None or not way.is_needed:
        return (*words, *where)
    return (*words, "-o", f"ProxyCommand={way.command}", *_without_jump(where))


def _without_jump(where: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words without -J, which ssh refuses beside a ProxyCommand."""
    kept: list[str] = []
    words = iter(where)
    for word in words:
        if word == "-J":
            next(words, None)
        elif not word.startswith("-J"):
            kept.append(word)
    return tuple(kept)


def _way(program: str, jumps: str, config: str | None, *, depth: int) -> _Way | None:
    """Return the way to the last host of `jumps`: through the hosts before it, or through the jumps of its
    own configuration.

    Source: OpenSSH 9.2p1 ssh.c, where options.jump_host becomes options.proxy_command
    """
    if jumps.lower() == "none" or depth > MAX_DEPTH:  # a circle: ssh itself will report it
        return None
    before, _, last = jumps.rpartition(",")
    match = _JUMP.fullmatch(last.strip())
    if match is None:
        return None
    words: list[str] = []
    for flag, value in (("-l", match["user"]), ("-p", match["port"]), ("-F", config)):
        if value is not None:
            words += [flag, value]
    where = ("--", match["host"].strip("[]"))
    known = asked(program, (*words, *where))
    way = _way(program, before or known.get("proxyjump", "none"), config, depth=depth + 1)
    is_needed = _takes_changed(known) or (way is not None and way.is_needed)
    told = [word for name, value in STRICT.items() for word in ("-o", f"{name}={value}")]
    if _takes_changed(known):
        told += _TAKES_NEW
    if way is not None:
        told += ["-o", f"ProxyCommand={way.command}"]
    argv = [program, *told, *words, "-W", "[%h]:%p", *where]
    # ssh expands %h and the like once more in the inner command; %% becomes % then.
    quoted = [shlex.quote(word if word == "[%h]:%p" else word.replace("%", "%%")) for word in argv]
    return _Way(" ".join(quoted), is_needed)


def asked(program: str, where: tuple[str, ...]) -> Facts:
    """Return ssh's own configuration for a host; empty if `ssh -G` fails.

    `where`: the words that name it. Errors: LaunchError if ssh does not answer
    """
    try:
        ran = subprocess.run(
            [program, "-G", *where],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=ASK_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"ssh -G does not say how it checks the host's key ({error}); look for a Match exec in the ssh "
            "configuration that does not end, and test with: ssh -G HOST",
            exit_code=EXIT_HOST,
        ) from None
    lines = ran.stdout.decode("utf-8", "replace").split("\n")
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}


def _takes_changed(known: Facts) -> bool:
    return known.get("stricthostkeychecking", "") in _TAKES_CHANGED
