"""The words in front of a host's commands, e.g. `podman exec -i box`: they lead into a container.

[Note: The agent runs inside]
The prefix runs once on each host, for the agent, so that all ranks of the host are in one container. The
agent then works for its workers as on a host: it is their parent, sees their processes and their cgroup, and
its files lie where they see them. The other design, an agent outside with a prefix for each rank, has
faults: clients such as `docker exec` pass on no signals, no descriptors and no environment, and their exit
codes 125 to 127 may be their own, so an agent inside would still be needed; and NCCL wants the
ranks of a host to share memory.
"""

from __future__ import annotations

import re
import shlex

HOST = "{host}"  # stands for the host's name
EXAMPLE = "podman exec -i box"
_PLACEHOLDER = re.compile(r"(?<!\{)\{[a-z_]+\}(?!\})")  # but not podman's own formats, such as {{.Id}}


class PrefixMistake(ValueError):
    """The text is no prefix; the message says why, as the end of a sentence."""


def read_prefix(text: str) -> tuple[str, ...]:
    """Return the words of a text, divided as a shell does; empty for an empty text, which means no prefix.

    Errors: PrefixMistake
    """
    if not text.isprintable():
        raise PrefixMistake("a line end or another character that cannot be shown stands in it")
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise PrefixMistake("a quote or a backslash at its end has nothing that closes it") from None
    if words and words[0].startswith("-"):
        raise PrefixMistake(f"it begins with a program, and {words[0]!r} is an option")
    if words and not words[0]:
        raise PrefixMistake("it begins with a program, and its first word is empty")
    if words and "=" in words[0]:
        raise PrefixMistake(
            f"it begins with a program; {words[0].partition('=')[0]} is set by env NAME=VALUE"
        )
    unknown = [one for word in words for one in _PLACEHOLDER.findall(word) if one != HOST]
    if unknown:
        raise PrefixMistake(
            f"{unknown[0]} stands for nothing, since it runs once on a host, for all ranks there; only "
            f"{HOST} is replaced"
        )
    return words


def prefix_of(words: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Return the words for one host."""
    return tuple(word.replace(HOST, host) for word in words)
