"""The network of a lab: a bridge in a namespace of its own (no way out) and one cable from it to every host.

A cable is a veth pair: its end at the bridge is named like the host, its end in the host is eth0.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .place import LabError, Place, address_of, mac_of


def add_switch(place: Place) -> None:
    _ip(f"netns add {place.switch}")
    _ip("link add br0 type bridge", "link set br0 up", netns=place.switch)


def add_hosts(place: Place, hosts: dict[str, int]) -> None:
    """Give each host, named with its index, a network namespace, a cable and an address."""
    _ip(*(f"netns add {place.netns(host)}" for host in hosts))
    cables: list[str] = []
    for host, index in hosts.items():
        end_in_host = f"peer name eth0 address {mac_of(index)} netns {place.netns(host)}"
        cables += [f"link add name {host} type veth {end_in_host}", f"link set {host} master br0 up"]
    _ip(*cables, netns=place.switch)
    for host, index in hosts.items():
        # Without an address of its own making (addrgenmode none) an idle host sends nothing at all.
        _ip(
            "link set lo up",
            "link set eth0 addrgenmode none",
            f"addr add {address_of(index)}/16 dev eth0",
            "link set eth0 up",
            netns=place.netns(host),
        )


def remove_host(place: Place, host: str) -> None:
    """Take the cable away first: a namespace is taken down in the background,
    with its cable still in the bridge.
    """
    _ip(f"link del {host}", netns=place.switch)
    _ip(f"netns del {place.netns(host)}")


def remove_all(place: Place) -> None:
    """Remove every namespace of this lab; no process may be left in them."""
    left = place.netns_left()
    if left:
        _ip(*(f"netns del {netns}" for netns in left))


def set_carrier(place: Place, host: str, *, is_up: bool) -> None:
    _ip(f"link set {host} {'up' if is_up else 'down'}", netns=place.switch)


def set_plugged(place: Place, host: str, *, is_plugged: bool) -> None:
    _ip(f"link set {host} {'master br0' if is_plugged else 'nomaster'}", netns=place.switch)


def connect(place: Place, host: str) -> None:
    """Plug in the cable, with carrier."""
    _ip(f"link set {host} master br0 up", netns=place.switch)


def cable_state(place: Place, host: str) -> str:
    """`up`, `link down` or `unplugged`."""
    words = _run(["ip", "-n", place.switch, "-o", "link", "show", "dev", host]).split()
    if "master" not in words:
        return "unplugged"
    return "up" if "UP" in words[2].strip("<>").split(",") else "link down"


def add_rule(place: Place, host: str, *rule: str) -> None:
    """Append a rule to the host's own firewall."""
    _run(["nsenter", f"--net={place.netns_file(host)}", "iptables", "-w", "-A", *rule])


def clear_rules(place: Place, host: str) -> None:
    """Empty the host's firewall."""
    _run(["nsenter", f"--net={place.netns_file(host)}", "iptables", "-w", "-F"])


def slow_down(place: Place, host: str, *, to: str, mbit_per_s: float) -> None:
    """What the host sends to these addresses goes no faster; of several limits the last one counts."""
    tc = ["tc", "-n", place.netns(host)]
    if " htb 1:" not in _run([*tc, "qdisc", "show", "dev", "eth0"]):
        _run([*tc, *["qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb"]])
    of_rate = f"1:{round(mbit_per_s):x}"
    _run([*tc, *f"class replace dev eth0 parent 1: classid {of_rate} htb rate {mbit_per_s}mbit".split()])
    _run([*tc, *f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {to} flowid {of_rate}".split()])


def end_slowness(place: Place, host: str) -> None:
    _run(["tc", "-n", place.netns(host), *["qdisc", "del", "dev", "eth0", "root"]])


def slow_down_incoming(place: Place, host: str, *, mbit_per_s: float) -> None:
    """What the switch sends to the host goes no faster."""
    shape = f"qdisc replace dev {host} root tbf rate {mbit_per_s}mbit burst 64kb latency 100ms"
    _run(["tc", "-n", place.switch, *shape.split()])


def end_incoming_slowness(place: Place, host: str) -> None:
    _run(["tc", "-n", place.switch, *["qdisc", "del", "dev", host, "root"]])


def reset_addresses(place: Place, host: str, index: int) -> None:
    """Take out every address and route that was added to the host, and give its own address back."""
    netns = place.netns(host)
    first = {("lo", "127.0.0.1/8"), ("lo", "::1/128"), ("eth0", f"{address_of(index)}/16")}
    lines = _run(["ip", "-n", netns, "-o", "addr", "show"]).splitlines()
    found = {(line.split()[1], line.split()[3]) for line in lines}
    changes = [f"addr del {address} dev {device}" for device, address in sorted(found - first)]
    if ("eth0", f"{address_of(index)}/16") not in found:
        changes.append(f"addr add {address_of(index)}/16 dev eth0")
    routes = _run(["ip", "-n", netns, "-o", "route", "show"]).splitlines()
    changes = [f"route del {route.strip()}" for route in routes if "proto kernel" not in route] + changes
    if changes:
        _ip(*changes, netns=netns)


def addresses_and_routes(init_pid: int) -> str:
    """What the kernel says of them in the network of that process, to compare with: no command is run, as
    a look by `ip` needs.
    """
    folder = Path(f"/proc/{init_pid}/net")
    return "".join((folder / name).read_text() for name in ("fib_trie", "route", "if_inet6"))


def interface_bytes(init_pid: int) -> tuple[int, int]:
    """Bytes that eth0 received and sent, in the network of that process."""
    for line in Path(f"/proc/{init_pid}/net/dev").read_text().splitlines():
        interface, _, counters = line.strip().partition(":")
        if interface == "eth0":
            words = counters.split()
            return int(words[0]), int(words[8])
    raise LabError(f"process {init_pid} has no eth0")


def _ip(*commands: str, netns: str | None = None) -> None:
    where = ["-n", netns] if netns else []
    _run(["ip", *where, "-batch", "-"], stdin="\n".join(commands) + "\n")


def _run(argv: list[str], *, stdin: str = "") -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}; it was given {stdin!r}")
    return done.stdout
