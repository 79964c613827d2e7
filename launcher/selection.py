"""Which hosts of the pool take part in a job, and with which devices.

`--include` and `--exclude` take items joined by '@', each a host or a host with some of its slots:

    worker-1            every slot of worker-1
    worker-1:0,2        slots 0 and 2
    worker-1:0-3,6      slots 0, 1, 2, 3 and 6
    [fd00::7]:0         slot 0 of an IPv6 address
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import LaunchError
from .hostfile import Host, host_key, is_ipv6

_SLOTS = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
_DEVICE = re.compile(r"[0-9]+|GPU-[0-9A-Za-z-]+|MIG-[0-9A-Za-z/-]+")
_NO_DEVICE = ("", "-1", "NoDevFiles")  # what people, CUDA and Slurm write to hide every device
_HOSTS_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A host that takes part, with the devices its processes use."""

    host: Host
    devices: tuple[str, ...]  # one per process, in local rank order: ("0", "1")


def select(
    hosts: Sequence[Host], *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> tuple[Selected, ...]:
    """The hosts that take part and the slots they use, always in hostfile order, slots ascending.

    A host that is included without slots gives all its slots. Hosts that keep no slot are left out. Names are
    compared as host_key() says. -1 is "not given" for both numbers, 0 is "no limit".
    Errors: LaunchError that names the option and quotes the item: unknown hosts, slots the host has not, more
    nodes or slots than there are, options that contradict each other, or nothing left.
    Source: DeepSpeed 0.19.6 launcher/runner.py, `parse_resource_filter` and the trimming in `main`; it accepts
    slots and numbers beyond the hostfile, which start workers that cannot find their device.
    """
    _check_combination(include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus)
    if not hosts:
        raise LaunchError(
            "no host to start on; write a hostfile with one line per host, e.g. 'worker-1 slots=8'"
        )
    if include:
        named = _parse_items(include, hosts, option="--include")
        kept = [(host, named.get(host.name, frozenset())) for host in hosts]
    elif exclude:
        named = _parse_items(exclude, hosts, option="--exclude")
        kept = [(host, frozenset(range(host.slots)) - named.get(host.name, frozenset())) for host in hosts]
    else:
        kept = [(host, frozenset(range(host.slots))) for host in _first(hosts, num_nodes, num_gpus)]
        if num_gpus > 0:
            kept = [(host, frozenset(range(num_gpus))) for host, _ in kept]
    selected = tuple(
        Selected(host=host, devices=tuple(str(slot) for slot in sorted(slots)))
        for host, slots in kept
        if slots
    )
    if not selected:
        if exclude:
            raise LaunchError(
                f"--exclude {exclude!r}: nothing is left; the hosts are {_listed(hosts)}; "
                "leave at least one slot of one host"
            )
        raise LaunchError(f"no host has a slot ({_listed(hosts)}); give one of them slots=1 or more")
    return selected


def local_devices_from_visible(value: str) -> tuple[str, ...]:
    """The devices that a value of CUDA_VISIBLE_DEVICES shows, verbatim and in its order.

    Errors: LaunchError if an id is neither an index nor a GPU- or MIG- id, or is given twice.
    """
    if value.strip() in _NO_DEVICE:
        return ()
    devices: list[str] = []
    for piece in value.split(","):
        device = piece.strip()
        if not _DEVICE.fullmatch(device):
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={value!r}: {device!r} is not a device; allowed are an index, GPU-... and "
                "MIG-..., joined by commas; write e.g. CUDA_VISIBLE_DEVICES=0,1"
            )
        if device in devices:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={value!r}: device {device!r} is given twice, and one device takes one "
                f"process; write e.g. CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(value.replace(' ', '').split(',')))}"
            )
        devices.append(device)
    return tuple(devices)


def _check_combination(*, include: str, exclude: str, num_nodes: int, num_gpus: int) -> None:
    if include and exclude:
        raise LaunchError(
            f"--include {include!r} and --exclude {exclude!r}: only one of the two is allowed; "
            "give --include with what takes part, or --exclude with what does not"
        )
    for option, number in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if number < -1:
            raise LaunchError(
                f"{option} {number}: a whole number is allowed, 0 for no limit; write e.g. {option} 2"
            )
        if number >= 0 and (include or exclude):
            other = f"--include {include!r}" if include else f"--exclude {exclude!r}"
            raise LaunchError(
                f"{option} {number} and {other}: a number cannot be combined with names; give one of the two"
            )


def _first(hosts: Sequence[Host], num_nodes: int, num_gpus: int) -> Sequence[Host]:
    """The first `num_nodes` hosts, each of which has `num_gpus` slots."""
    if num_nodes > len(hosts):
        there = "there is 1 host" if len(hosts) == 1 else f"there are {len(hosts)} hosts"
        raise LaunchError(
            f"--num_nodes {num_nodes}: {there} ({_listed(hosts)}); "
            f"give at most {len(hosts)}, or add lines to the hostfile"
        )
    first = hosts[:num_nodes] if num_nodes > 0 else hosts
    smallest = min(first, key=lambda host: host.slots)
    if num_gpus > smallest.slots:
        raise LaunchError(
            f"--num_gpus {num_gpus}: the smallest host, {smallest.name!r}, has slots={smallest.slots}; "
            f"give at most {smallest.slots}, or name each host's slots with --include"
        )
    return first


def _parse_items(text: str, hosts: Sequence[Host], *, option: str) -> dict[str, frozenset[int]]:
    """The slots that each named host is given, by its name; a host named twice gets both."""
    host_of = {host_key(host.name): host for host in hosts}
    named: dict[str, frozenset[int]] = {}
    for item in text.split("@"):
        host, slots = _parse_item(item.strip(), text, host_of, option=option)
        named[host.name] = named.get(host.name, frozenset()) | slots
    return named


def _parse_item(
    item: str, text: str, host_of: dict[str, Host], *, option: str
) -> tuple[Host, frozenset[int]]:
    hosts = tuple(host_of.values())
    example = f"{option} {_shown(hosts[0])}:0"
    if not item:
        raise LaunchError(
            f"{option} {text!r}: an item is empty; allowed are hosts or hosts with slots, joined by '@'; "
            f"write e.g. {example}"
        )
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::([^:]*))?", item)
    if match is None:
        if is_ipv6(item):
            why, example = "an IPv6 address stands in brackets here", f"{option} [{item}]"
        else:
            why = "allowed is a host, or a host, one ':' and its slots"
        raise LaunchError(f"{option} {item!r}: {why}; write e.g. {example}")
    name, slots = match[1].strip(), match[2]
    host = host_of.get(host_key(name[1:-1] if is_ipv6(name[1:-1]) else name))
    if host is None:
        raise _unknown_host(name, item, hosts, option=option)
    if slots is None:
        return host, frozenset(range(host.slots))
    return host, frozenset(
        slot for piece in slots.split(",") for slot in _parse_slots(piece.strip(), item, host, option=option)
    )


def _parse_slots(piece: str, item: str, host: Host, *, option: str) -> range:
    name = _shown(host)
    match = _SLOTS.fullmatch(piece)
    if match is None:
        raise LaunchError(
            f"{option} {item!r}: {piece!r} is not a slot; allowed are numbers and ranges joined by commas, "
            f"or {name!r} alone for all its slots; write e.g. {option} {name}:0"
        )
    first, last = (_slot_number(digits, host) for digits in (match[1], match[2] or match[1]))
    allowed = f"0-{host.slots - 1}" if host.slots > 1 else "0"
    if last >= host.slots or first >= host.slots:
        raise LaunchError(
            f"{option} {item!r}: host {host.name!r} has slots={host.slots}, so {piece} is beyond the allowed "
            f"{allowed}; write e.g. {option} {name}:{allowed}"
        )
    if first > last:
        raise LaunchError(
            f"{option} {item!r}: the range {piece} runs backwards; allowed is FIRST-LAST; "
            f"write e.g. {option} {name}:{last}-{first}"
        )
    return range(first, last + 1)


def _slot_number(digits: str, host: Host) -> int:
    """The number, or any that is beyond the host's slots: int() refuses a text of thousands of digits."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(host.slots)) else host.slots


def _unknown_host(name: str, item: str, hosts: Sequence[Host], *, option: str) -> LaunchError:
    near = difflib.get_close_matches(host_key(name), [host_key(host.name) for host in hosts], n=1)
    hint = next((f"; did you mean {_shown(host)!r}?" for host in hosts if [host_key(host.name)] == near), "")
    return LaunchError(
        f"{option} {item!r}: no host is named {name!r}; the hosts are {_listed(hosts)}"
        + (hint or f"; write e.g. {option} {_shown(hosts[0])}")
    )


def _shown(host: Host) -> str:
    return f"[{host.name}]" if ":" in host.name else host.name


def _listed(hosts: Sequence[Host]) -> str:
    more = f" and {len(hosts) - _HOSTS_LISTED} more" if len(hosts) > _HOSTS_LISTED else ""
    return ", ".join(_shown(host) for host in hosts[:_HOSTS_LISTED]) + more
