"""A hostfile in one word, as `--hostfile` takes it: `node[1-4]:8,ada@gpu7:4,[fd00::7]:auto`.

Items are joined by commas; each is a host or a range of hosts, a ':', and the slots of each of its hosts.
`mpirun --host`, `mpiexec -hosts` and `horovodrun -H` have the same form.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import LaunchError
from .host import MAX_SLOTS, Host, Pairs, hosts_named, is_ipv6, spelled
from .host_range import BRACKETS, MAX_HOSTS

_SHOWN_LENGTH = 120


class _Item(NamedTuple):
    """One item of a list, as errors quote it."""

    text: str
    target: str

    def refusal(self, why: str, *, example: Pairs, key: str = "", name: str = "") -> LaunchError:
        shown = self.text if len(self.text) <= _SHOWN_LENGTH else self.text[:_SHOWN_LENGTH] + "..."
        slots = dict(example).get("slots", "8")
        target = name or self.target
        target = target if len(target) <= _SHOWN_LENGTH else "node[01-16]"
        return LaunchError(
            f"--hostfile {shown!r}: {why}; write e.g. --hostfile '{target}:{slots}', or the path of a file "
            "(there is none of this name)"
        )


def is_host_list(text: str) -> bool:
    """Tell whether `text`, which is no file, was meant as a list of hosts. A host without slots is not taken
    for a list: it may be a mistyped path.
    """
    return "/" not in BRACKETS.sub("", text) and any(letter in text for letter in ",:[")


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Return the hosts of the list, in its order.

    Errors: LaunchError that quotes an item of the wrong form, without slots or with a host named twice; or
    for more than MAX_HOSTS hosts.
    """
    hosts: list[Host] = []
    known: set[str] = set()
    for piece in split_list(text):
        target, slots = split_slots(piece.strip())
        item = _Item(text=piece.strip(), target=target)
        _check_form(item, slots)
        found = hosts_named(target, {} if slots is None else {"slots": slots}, (), place=item)
        for host in found:
            if spelled(host.name) in known:
                why = f"host {host.name!r} is named twice, and a host has one item for all its slots"
                raise item.refusal(why, example=(("slots", slots or "8"),))
            known.add(spelled(host.name))
        hosts += found
        if len(hosts) > MAX_HOSTS:
            why = f"there are more hosts than the {MAX_HOSTS} that a list may have"
            raise item.refusal(why, example=(), name="node[01-16]")
    return tuple(hosts)


def split_list(text: str) -> list[str]:
    """Split the text at commas that are not in brackets."""
    items: list[str] = []
    start, is_inside = 0, False
    for place, letter in enumerate(text):
        if letter in "[]":
            is_inside = letter == "["
        elif letter == "," and not is_inside:
            items.append(text[start:place])
            start = place + 1
    return [*items, text[start:]]


def split_slots(item: str) -> tuple[str, str | None]:
    """Split `node1:8` into the host and its slots, which are None if there are none."""
    target, colon, slots = item.rpartition(":")
    if not colon or "]" in slots or is_ipv6(item.rpartition("@")[2]):
        return item, None
    return target, slots


def _check_form(item: _Item, slots: str | None) -> None:
    """Errors: LaunchError for an item with misplaced commas or colons, which the rules of a hostfile's line
    do not cover.
    """
    example: Pairs = (("slots", "8"),)
    if not item.text:
        raise LaunchError(
            "--hostfile: an item of the list is empty; allowed are hosts with slots joined by commas; write "
            "e.g. --hostfile 'node[1-4]:8,gpu7:4'"
        )
    if ":" in item.target and "[" not in item.target:
        address = item.target.rpartition("@")[2]
        name = f"[{address}]" if is_ipv6(address) else "[fd00::7]"
        why = "one ':' stands between a host and its slots, and an IPv6 address stands in brackets"
        raise item.refusal(why, example=example, name=name)
    if slots is not None and slots.isascii() and slots.isdigit() and int(slots[:9]) > MAX_SLOTS:
        why = (
            f"a number behind ':' is that of the slots, {MAX_SLOTS} at most; a port is given as "
            "--ssh_port or --master_port"
        )
        raise item.refusal(why, example=example)
