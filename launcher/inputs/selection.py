"""The hosts of the pool that take part in a job, and their devices.

`--include` and `--exclude` take items joined by '@', each a host or a host with some of its slots:

    worker-1            every slot of worker-1
    worker-1:0,2        slots 0 and 2
    worker-1:0-3,6      slots 0, 1, 2, 3 and 6
    [fd00::7]:0         slot 0 of an IPv6 address
    node[01-16]:0       slot 0 of 16 hosts

Slots of a host with devices= in the hostfile are the device ids of that list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import LaunchError
from .host import MAX_SLOTS, Host, device_id, host_key, is_ipv6
from .host_range import RangeMistake, expand

_SLOTS = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
_NO_DEVICE = ("", "-1", "NoDevFiles")  # values by which users, CUDA and Slurm hide every device
_AT = "'@' stands between two hosts"
_BETWEEN = re.compile(r"[,;|/\s]+")  # signs that users write between hosts instead of '@'
_HOSTS_LISTED = 10


class Selected(NamedTuple):
    """A host that takes part, with the devices its processes use."""

    host: Host
    devices: tuple[str, ...]  # one per process, in local rank order: ("0", "1")


class _Item(NamedTuple):
    """One item's part about one host. `slots` is the unparsed text; None means all slots."""

    option: str
    text: str
    host: Host
    slots: str | None


def select(
    hosts: Sequence[Host], *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> tuple[Selected, ...]:
    """Return the hosts that take part and the devices they use, always in hostfile order, devices in the
    host's order.

    A host that is included without slots gives all its slots. Hosts that keep no slot are left out. Names are
    compared by host_key(). No host of hosts_in_question() may have slots=auto. For both numbers -1 is "not
    given", 0 is "no limit".
    Errors: LaunchError that names the option and quotes the item: unknown hosts, slots that the host does
    not have, more nodes or slots than there are, options that contradict each other, or nothing left.
    Source: DeepSpeed 0.19.6 launcher/runner.py, `parse_resource_filter` and the trimming in `main`;
    DeepSpeed accepts slots and numbers beyond the hostfile, and then starts workers that cannot find their
    device.
    """
    _check_combination(include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus)
    _check_hosts(hosts)
    if include:
        named = _parse_items(include, hosts, option="--include")
        kept = [(host, _devices_of(named[host.name])) for host in hosts if host.name in named]
    elif exclude:
        named = _parse_items(exclude, hosts, option="--exclude")
        gone = {name: _devices_of(items) for name, items in named.items() if not _is_only_whole(items)}
        kept = [
            (host, frozenset(host.device_ids) - gone.get(host.name, frozenset()))
            for host in hosts
            if not _is_only_whole(named.get(host.name, ()))
        ]
    else:
        first = _first(hosts, num_nodes)
        _check_num_gpus(first, num_gpus)
        kept = [(host, frozenset(host.device_ids[: num_gpus if num_gpus > 0 else None])) for host in first]
    selected = tuple(
        Selected(host=host, devices=tuple(device for device in host.device_ids if device in devices))
        for host, devices in kept
        if devices
    )
    if not selected:
        if not exclude:
            raise LaunchError(f"no host has a slot ({_listed(hosts)}); give one of them slots=1 or more")
        raise LaunchError(
            f"--exclude {exclude!r}: nothing is left; the hosts are {_listed(hosts)}; "
            "leave at least one slot of one host"
        )
    return selected


def hosts_in_question(
    hosts: Sequence[Host], *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> tuple[Host, ...]:
    """Return the hosts whose slots select() needs to know, in hostfile order: those to look at with
    slots=auto.

    Errors: LaunchError as select(), for mistakes that show without the slots.
    """
    _check_combination(include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus)
    _check_hosts(hosts)
    if include:
        named = _parse_items(include, hosts, option="--include")
        return tuple(host for host in hosts if host.name in named)
    if exclude:
        named = _parse_items(exclude, hosts, option="--exclude")
        return tuple(host for host in hosts if not _is_only_whole(named.get(host.name, ())))
    return tuple(_first(hosts, num_nodes))


def named_hosts(text: str, hosts: Sequence[Host], *, option: str) -> dict[str, tuple[str, ...] | None]:
    """Return the names of the hosts that `text` names in the form of --include, each with its devices in the
    host's order, or None if it is named without slots. A host whose slots are unknown may be named so.

    Errors: LaunchError that names the option: unknown hosts, or slots that a host does not have
    """
    found: dict[str, tuple[str, ...] | None] = {}
    for name, items in _parse_items(text, hosts, option=option).items():
        if any(item.slots is None for item in items):
            found[name] = None
        else:
            devices = _devices_of(items)
            found[name] = tuple(one for one in items[0].host.device_ids if one in devices)
    return found


def local_devices_from_visible(value: str) -> tuple[str, ...]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES shows, verbatim and in its order.

    Errors: LaunchError if an id is neither an index nor a GPU- or MIG- id, or is given twice.
    """
    if value.strip() in _NO_DEVICE:
        return ()
    devices: list[str] = []
    for piece in value.split(","):
        device = device_id(piece.strip())
        if device is None:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={value!r}: {piece.strip()!r} is not a device; allowed are an index, "
                "GPU-... and MIG-..., joined by commas; write e.g. CUDA_VISIBLE_DEVICES=0,1"
            )
        if device in devices:
            left = dict.fromkeys(device_id(one.strip()) or one.strip() for one in value.split(","))
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={value!r}: device {device!r} is given twice, and one device takes one "
                f"process; write e.g. CUDA_VISIBLE_DEVICES={','.join(left)}"
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
        if number >= 0 and (include or exclude):
            other = f"--include {include!r}" if include else f"--exclude {exclude!r}"
            raise LaunchError(
                f"{option} {number} and {other}: a number cannot be combined with names; give one of the two"
            )


def _check_hosts(hosts: Sequence[Host]) -> None:
    if not hosts:
        raise LaunchError(
            "no host to start on; write a hostfile with one line per host, e.g. 'worker-1 slots=8'"
        )


def _first(hosts: Sequence[Host], num_nodes: int) -> Sequence[Host]:
    if num_nodes > len(hosts):
        there = "there is 1 host" if len(hosts) == 1 else f"there are {len(hosts)} hosts"
        raise LaunchError(
            f"--num_nodes {num_nodes}: {there} ({_listed(hosts)}); "
            f"give at most {len(hosts)}, or add lines to the hostfile"
        )
    return hosts[:num_nodes] if num_nodes > 0 else hosts


def _check_num_gpus(hosts: Sequence[Host], num_gpus: int) -> None:
    smallest = min(hosts, key=lambda host: len(host.device_ids))
    most = len(smallest.device_ids)
    if num_gpus > most:
        raise LaunchError(
            f"--num_gpus {num_gpus}: the smallest host, {smallest.name!r}, has {_size(smallest)}; "
            f"give at most {most}, or name each host's slots with --include"
        )


def _size(host: Host) -> str:
    return f"slots={host.slots}" if host.devices is None else f"devices={','.join(host.devices)}"


def _parse_items(text: str, hosts: Sequence[Host], *, option: str) -> dict[str, tuple[_Item, ...]]:
    """Return the items of each host, by its name."""
    host_of: dict[str, Host] = {}
    for host in hosts:
        host_of.setdefault(host_key(host.name), host)
    host_of.update((host.name, host) for host in hosts)  # names may differ in case only
    named: dict[str, tuple[_Item, ...]] = {}
    for piece in text.split("@"):
        for item in _parse_item(piece.strip(), text, host_of, option=option):
            named[item.host.name] = (*named.get(item.host.name, ()), item)
    return named


def _is_only_whole(items: Sequence[_Item]) -> bool:
    """Tell whether all items name the host without slots: then their number does not matter."""
    return bool(items) and all(item.slots is None for item in items)


def _devices_of(items: Sequence[_Item]) -> frozenset[str]:
    """Return all devices that the items name; a host named twice gets both."""
    found: set[str] = set()
    for item in items:
        if item.slots is None:
            found.update(item.host.device_ids)
        else:
            for piece in item.slots.split(","):
                found.update(_parse_slots(piece.strip(), item))
    return frozenset(found)


def _parse_item(item: str, text: str, host_of: dict[str, Host], *, option: str) -> list[_Item]:
    hosts = tuple(dict.fromkeys(host_of.values()))
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
            if "," in item:
                why += f", and {_AT}"
        raise LaunchError(f"{option} {item!r}: {why}; write e.g. {example}")
    name, slots = match[1].strip(), match[2]
    found = []
    for one in _names(name, item, option=option):
        host = host_of.get(one) or host_of.get(host_key(one))
        if host is None:
            raise _unknown_host(one, item, hosts, option=option)
        found.append(_Item(option=option, text=item, host=host, slots=slots))
    return found


def _names(name: str, item: str, *, option: str) -> tuple[str, ...]:
    if is_ipv6(name[1:-1]):
        return (name[1:-1],)
    try:
        return expand(name)
    except RangeMistake as mistake:
        raise LaunchError(f"{option} {item!r}: {mistake}; write e.g. {option} node[01-16]") from None


def _parse_slots(piece: str, item: _Item) -> list[str]:
    """Return the devices that one piece between commas names: a device, or a range of indices."""
    name = _shown(item.host)
    ids = item.host.device_ids
    head = f"{item.option} {item.text!r}: "
    match = _SLOTS.fullmatch(piece)
    if match is None and device_id(piece) is None:
        next_host = f", and {_AT}" if item.slots != piece and piece[:1].isalpha() else ""
        raise LaunchError(
            f"{head}{piece!r} is not a slot; allowed are numbers and ranges joined by commas, "
            f"or {name!r} alone for all its slots{next_host}; write e.g. {item.option} {name}:{ids[0]}"
        )
    first, last = (_index(digits) for digits in (match[1], match[2] or match[1])) if match else (0, 0)
    span = range(first, last + 1) if first <= last else ()
    known = frozenset(ids)
    if not known.issuperset([piece] if match is None else map(str, [first, last, *span])):
        allowed = ",".join(ids) if item.host.devices else f"0-{len(ids) - 1}" if len(ids) > 1 else "0"
        raise LaunchError(
            f"{head}host {item.host.name!r} has {_size(item.host)}, so {piece} is beyond the allowed "
            f"{allowed}; write e.g. {item.option} {name}:{allowed}"
        )
    if first > last:
        raise LaunchError(
            f"{head}the range {piece} runs backwards; allowed is FIRST-LAST; "
            f"write e.g. {item.option} {name}:{last}-{first}"
        )
    return [piece] if match is None else list(map(str, span))


def _index(digits: str) -> int:
    """Return the number; for a text too long for int(), which refuses thousands of digits, a number that no
    host has.
    """
    digits = digits.lstrip("0") or "0"
    return min(int(digits), MAX_SLOTS) if len(digits) <= len(str(MAX_SLOTS)) else MAX_SLOTS


def _unknown_host(name: str, item: str, hosts: Sequence[Host], *, option: str) -> LaunchError:
    words = [one for one in _BETWEEN.split(name) if one]
    if len(words) > 1:
        return LaunchError(
            f"{option} {item!r}: {_AT}, and ',' between the slots of one; write e.g. "
            f"{option} '{'@'.join(words)}'"
        )
    import difflib

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
