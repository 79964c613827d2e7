"""Speed of the network between hosts, as `dslaunch check --bandwidth` measured it, and slow parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...shared.table import table, terminal_columns
from ..output.screen_text import screen_text
from ..wording import shown_ms, shown_size
from .check_facts import Finding, clean

_Hosts = tuple[str, ...]

# A link slower than most by this factor is reported; smaller differences are noise from other jobs
SLOW_FACTOR = 3.0
NO_ANSWER = "no answer"
# Reported: a latency so many times that of most, and longer by at least so much
LATE_FACTOR, LATE_S = 5.0, 0.001
MAX_PAIRS_SHOWN = 28  # all pairs of eight hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCollective:
    """One collective operation of all hosts; the speed is that of each link."""

    name: str
    num_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts: the speed of each direction. `error` says why it was not measured."""

    hosts: _Hosts
    latency_s: float = 0.0
    bytes_per_s: tuple[float, float] = (0.0, 0.0)
    error: str = ""

    @property
    def slowest(self) -> float:
        return min(self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """All results. `error` is that of the operations of all hosts together; the measurement ended because
    the `silent` hosts did not answer.
    """

    backend: str
    collectives: tuple[HostCollective, ...]
    error: str
    pairs: tuple[Pair, ...]
    silent: tuple[str, ...]
    timeout_s: float


def read_network(text: str, names: Sequence[str], *, timeout_s: float) -> Network:
    """Read rank 0's output after the mark; `names` are the hosts, by rank.

    Errors: ValueError if the output has another form
    """
    try:
        told = json.loads(text)
        together, pairs = told["together"], told["pairs"]
        collectives = [
            HostCollective(
                name=clean(name),
                num_bytes=int(one["bytes"]),
                seconds=float(one["seconds"]),
                bytes_per_s=float(one["bytes_per_s"]),
            )
            for name, one in (together["found"] or [{}])[0].items()
            if name != "error"
        ]
        return Network(
            backend=clean(str(told["backend"])),
            collectives=tuple(collectives),
            error=_error_of(together, names),
            pairs=tuple(_pair(one, names) for one in pairs),
            silent=tuple(names[rank] for rank in told["silent"]),
            timeout_s=timeout_s,
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _pair(group: dict[str, Any], names: Sequence[str]) -> Pair:
    first, second = (names[rank] for rank in group["ranks"])
    error = _error_of(group, names)
    if error:
        return Pair(hosts=(first, second), error=error)
    there, back = group["found"]
    if not (there and back):
        return Pair(hosts=(first, second), error=NO_ANSWER)
    return Pair(
        hosts=(first, second),
        latency_s=float(there["latency_s"]),
        bytes_per_s=(float(there["bytes_per_s"]), float(back["bytes_per_s"])),
    )


def _error_of(group: dict[str, Any], names: Sequence[str]) -> str:
    """Return the first error, with its host."""
    for rank, found in zip(group["ranks"], group["found"], strict=True):
        if "error" in found:
            return f"{clean(str(found['error']))} (on {names[rank]})"
    return ""


def faults_of(network: Network) -> tuple[Finding, ...]:
    """Return faulty hosts first, then links of hosts that are not at fault themselves."""
    found = [*_silent_hosts(network)]
    if not found:
        found += _broken(network)
    found += [*_slow_hosts(network)]
    slow = {one.hosts[0] for one in found if len(one.hosts) == 1}
    found += _slow_links([pair for pair in network.pairs if not slow.intersection(pair.hosts)])
    if network.error and not found:
        found.append(_fault((), f"all hosts together: {network.error}; read what the ranks wrote above"))
    return tuple(found)


def _silent_hosts(network: Network) -> Iterable[Finding]:
    """Find two hosts that fell silent while they had to exchange data: they wait for each other."""
    waiting = [pair.hosts for pair in network.pairs if {*pair.hosts} <= {*network.silent}]
    text = f"did not answer within {2 * network.timeout_s:g} s"
    for hosts in waiting:
        yield _fault(hosts, f"cannot exchange data: both {text}; {_ADVICE_ON_BREAKS}")
    for host in network.silent:
        if not any(host in hosts for hosts in waiting):
            yield _fault((host,), f"{text}; look at the host and its network")


def _broken(network: Network) -> Iterable[Finding]:
    """Find hosts with only broken links, if others have working ones; then single broken links."""
    working = {host for pair in network.pairs if not pair.error for host in pair.hosts}
    cut_off = {host for pair in network.pairs for host in pair.hosts} - working if working else set()
    for host in sorted(cut_off):
        error = next(pair.error for pair in network.pairs if host in pair.hosts)
        yield _fault((host,), f"no other host can exchange data with it: {error}; {_ADVICE_ON_BREAKS}")
    for pair in network.pairs:
        if pair.error and not cut_off.intersection(pair.hosts):
            yield _fault(pair.hosts, f"cannot exchange data: {pair.error}; {_ADVICE_ON_BREAKS}")


def _slow_hosts(network: Network) -> Iterable[Finding]:
    """Compare hosts by their fastest link: one slow link does not show that the host is slow."""
    links: dict[_Hosts, list[Pair]] = {}
    for pair in network.pairs:
        for host in pair.hosts if not pair.error else ():
            links.setdefault((host,), []).append(pair)
    speeds = {host: max(pair.slowest for pair in pairs) for host, pairs in links.items()}
    latencies = {host: min(pair.latency_s for pair in pairs) for host, pairs in links.items()}
    what = ("even its fastest link carries", "even its quickest link takes")
    yield from _compared(speeds, latencies, what=what, advice=_ADVICE_ON_HOSTS)


def _slow_links(pairs: Sequence[Pair]) -> Iterable[Finding]:
    working = [pair for pair in pairs if not pair.error]
    speeds = {pair.hosts: pair.slowest for pair in working}
    latencies = {pair.hosts: pair.latency_s for pair in working}
    what = ("the link between them carries", "a message between them takes")
    yield from _compared(speeds, latencies, what=what, advice=_ADVICE_ON_LINKS)


def _compared(
    speeds: dict[_Hosts, float], latencies: dict[_Hosts, float], *, what: tuple[str, str], advice: str
) -> Iterable[Finding]:
    """Return the values that are far from the median, none of only two: then either could be at fault."""
    if len(speeds) < 3:
        return
    usual, usual_s = median(speeds.values()), median(latencies.values())
    for hosts, speed in speeds.items():
        latency_s = latencies[hosts]
        if usual > SLOW_FACTOR * speed:
            told = f"{what[0]} {_shown_speed(speed)}, where most carry {_shown_speed(usual)}"
            yield _fault(hosts, f"{told}: {_times(usual / speed)} as slow; {advice}")
        elif latency_s > LATE_FACTOR * usual_s and latency_s > usual_s + LATE_S:
            told = f"{what[1]} {shown_ms(latency_s)}, where most take {shown_ms(usual_s)}"
            yield _fault(hosts, f"{told}: {_times(latency_s / usual_s)} as long; {advice}")


_ADVICE_ON_BREAKS = (
    "look at firewalls, and at which interface is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)
_ADVICE_ON_HOSTS = "look at its network card, cable and port"
_ADVICE_ON_LINKS = "look at the switches and routes between them"


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor >= 10 else f"{factor:.1f} times"


def _fault(hosts: tuple[str, ...], text: str) -> Finding:
    return Finding(hosts=hosts, text=text, is_problem=True)


def network_as_text(network: Network) -> str:
    """Write the results as text, then the faults."""
    lines = ["", f"Network, with one rank on each host ({network.backend}):"]
    columns = terminal_columns()
    columns = columns and columns - 2
    collectives = [
        (one.name, shown_size(one.num_bytes), shown_ms(one.seconds), _shown_speed(one.bytes_per_s))
        for one in network.collectives
    ]
    if collectives:
        head = ("collective", "size", "time", "on each link")
        lines += [
            f"  {line}" for line in table(collectives, head=head, numbers=(1, 2, 3), columns=columns)
        ] + [""]
    shown = sorted(network.pairs, key=lambda pair: pair.slowest)[:MAX_PAIRS_SHOWN]
    if len(shown) == len(network.pairs):
        shown = list(network.pairs)
    else:
        lines.append(f"  the slowest {len(shown)} of {len(network.pairs)} pairs of hosts:")
    pairs: list[tuple[str, ...]] = [
        (" - ".join(pair.hosts), pair.error)
        if pair.error
        else (" - ".join(pair.hosts), shown_ms(pair.latency_s), *map(_shown_speed, pair.bytes_per_s))
        for pair in shown
    ]
    if pairs:
        head = ("hosts", "latency", "there", "back")
        lines += [f"  {line}" for line in table(pairs, head=head, numbers=(1, 2, 3), columns=columns)]
    faults = faults_of(network)
    verdict = "No link and no host is slow."
    if len(network.pairs) < 3:
        verdict = "There is no other link to compare with: judge the figures yourself."
    lines += ["", "Problems of the network:" if faults else verdict]
    lines += [f"  {' and '.join(one.hosts) or 'all'}: {one.text}" for one in faults]
    return screen_text(lines)


def network_as_dict(network: Network) -> dict[str, Any]:
    """Return the results as JSON has them."""
    return {
        "backend": network.backend,
        "error": network.error,
        "silent": list(network.silent),
        "collectives": {
            one.name: {"bytes": one.num_bytes, "seconds": one.seconds, "bytes_per_s": one.bytes_per_s}
            for one in network.collectives
        },
        "pairs": [
            {
                "hosts": list(pair.hosts),
                "latency_s": pair.latency_s,
                "bytes_per_s": list(pair.bytes_per_s),
                "error": pair.error,
            }
            for pair in network.pairs
        ],
        "problems": [{"hosts": list(one.hosts), "text": one.text} for one in faults_of(network)],
    }


def _shown_speed(bytes_per_s: float) -> str:
    """Write bytes as networks count them, in powers of ten."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.2f} {unit}"
    return f"{bytes_per_s / 1e3:.1f} kB/s"
