"""The hostfile in YAML, for programs that generate it. The same hosts, keys and rules as in hostfile.py:

hosts:
  - {name: worker-1, slots: 8}
  - name: ada@worker-2
    devices: [0, 2]
    env: {NCCL_SOCKET_IFNAME: ib0}

or as a mapping of names to their keys:

hosts:
  worker-1: {slots: 8}
  node[01-16]: {slots: auto}
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import LaunchError
from .env_file import EnvEntry, raw_parts
from .host import KEYS, Host, Pairs, hosts_named, slots_of_both, spelled, unknown_key
from .yaml_file import Node, parse_yaml, shown

EXAMPLE = "hosts: [{name: worker-1, slots: 8}]"

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One item of `hosts`."""

    source: str
    path: str  # "hosts[2]" or "hosts.worker-1"
    is_named_by_key: bool
    target: str
    said: dict[str, Node]

    @property
    def where(self) -> str:
        return f"{self.source}: {self.path}"

    def refusal(self, why: str, *, example: Pairs, key: str = "", name: str = "") -> LaunchError:
        place = f".{key}" if key in self.said and key != "name" else ""
        value = f" {shown(self.said[key])}:" if key in self.said else ""
        target = name or self.target
        if set(target) & set("[]{},:#'\"") and not self.is_named_by_key:
            target = f'"{target}"'
        pairs = ", ".join(f"{one}: {'[' + text + ']' if one == 'devices' else text}" for one, text in example)
        head = f"{target}: {{{pairs}}}" if self.is_named_by_key else f"{{name: {target}, {pairs}}}"
        return LaunchError(f"{self.where}{place}:{value} {why}; write e.g. {head!r}")


def parse_yaml_hostfile(
    text: str, *, source: str, warn: Callable[[str], object] = lambda text: None
) -> tuple[Host, ...]:
    """Return the hosts that a YAML hostfile names, in its order. `warn` gets hosts with slots: 0.

    Errors: LaunchError with `source` and the place, as in `hosts.yaml: hosts[2].slots: 'x': ...`.
    """
    document = parse_yaml(text, source=source, example=EXAMPLE)
    if not isinstance(document, dict) or set(document) != {"hosts"}:
        found = shown(", ".join(document)) if isinstance(document, dict) else shown(document)
        raise LaunchError(
            f"{source}: {found} at the top; allowed is one key, 'hosts'; write e.g. {EXAMPLE!r}"
        )
    hosts: list[Host] = []
    path_of: dict[str, tuple[str, Host]] = {}
    items = _items(document["hosts"], source)
    for item in items:
        slots = item.said.get("slots")
        if isinstance(slots, str) and re.fullmatch("0+", slots):
            warn(f"{item.where}: {item.target} has slots=0 and takes no part")
            continue
        found_here = _parse_item(item)
        for host in found_here:
            first = path_of.get(spelled(host.name))
            if first is not None:
                raise item.refusal(
                    f"host {host.name!r} is named by {first[0]} already; leave one of them out",
                    example=slots_of_both(first[1], host),
                )
        path_of.update((spelled(host.name), (item.path, host)) for host in found_here)
        hosts += found_here
    if items and not hosts:
        raise LaunchError(
            f"{source}: every host in it has slots=0, so none can take part; write e.g. slots: 8 for one"
        )
    if not hosts:
        raise LaunchError(f"{source}: no host in it; write e.g. {EXAMPLE!r}")
    return tuple(hosts)


def _items(hosts: Node, source: str) -> list[_Item]:
    items: list[_Item] = []
    if isinstance(hosts, dict):
        for target, said in hosts.items():
            if not isinstance(said, dict) or not target.isprintable():
                raise LaunchError(
                    f"{source}: hosts: {shown(target)}: a host's name is followed by a mapping; "
                    "write e.g. 'worker-1: {slots: 8}'"
                )
            items.append(
                _Item(source=source, path=f"hosts.{target}", is_named_by_key=True, target=target, said=said)
            )
        return items
    if not isinstance(hosts, list):
        raise LaunchError(
            f"{source}: hosts: {shown(hosts)}: a list or a mapping of hosts is allowed; "
            f"write e.g. {EXAMPLE!r}"
        )
    for place, said in enumerate(hosts):
        path = f"hosts[{place}]"
        name = said.get("name") if isinstance(said, dict) else None
        if not isinstance(said, dict) or not isinstance(name, str):
            raise LaunchError(
                f"{source}: {path}: {shown(said)}: a host is a mapping with a name; "
                "write e.g. '{name: worker-1, slots: 8}'"
            )
        items.append(_Item(source=source, path=path, is_named_by_key=False, target=name, said=said))
    return items


def _parse_item(item: _Item) -> tuple[Host, ...]:
    values: dict[str, str] = {}
    for key, value in item.said.items():
        if key == "env" or (key == "name" and not item.is_named_by_key):
            continue
        if key not in KEYS:
            raise unknown_key(key, given=values, place=item)
        if key == "devices" and isinstance(value, list):
            value = ",".join(one if isinstance(one, str) else shown(one) for one in value)
        if key == "exec_prefix" and isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = shlex.join(map(str, value))
        if not isinstance(value, str):
            raise item.refusal(f"{key} is one word or number", example=(("slots", "8"),), key=key)
        values[key] = value
    return hosts_named(item.target, values, _parse_env(item), place=item)


def _parse_env(item: _Item) -> tuple[EnvEntry, ...]:
    said = item.said.get("env", {})
    example = (("slots", "8"), ("env", "{NCCL_DEBUG: INFO}"))
    if not isinstance(said, dict):
        raise item.refusal("env is a mapping of variables", example=example, key="env")
    entries = []
    for name, value in said.items():
        where = f"{item.where}.env"
        if not _ENV_NAME.fullmatch(name):
            raise item.refusal(
                f"{shown(name)} in env: a variable's name holds letters, digits and '_', and does not begin "
                "with a digit",
                example=example,
            )
        if not isinstance(value, str) or "\0" in value:
            raise item.refusal(f"env.{name} is one text without a NUL byte", example=example)
        entries.append(EnvEntry(name=name, value=raw_parts(value, name=name, where=where), source=where))
    return tuple(entries)
