"""The host whose link the others wait for, by how long data wait in the sockets of all hosts. Arithmetic
only.

In a ring every host waits for the slowest link, and all report the same times: their sockets show the
difference. Where data wait longest, sender or receiver is at fault. Acknowledgements of incoming data go out,
so a full link holds up the data of others to its host as well: of the two hosts the one whose other
connections wait longer is at fault. Source of the numbers: node/observe/links.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

ENTER = 0.15  # part of the time by which data wait longer than those of other hosts
ENTER_PART = 0.08  # the same, in each third of the window
LEAVE = 0.08
MUCH_WAITING = 0.15  # part of a step, for others and the network: less is not reported
ALONE = 0.30  # in place of ENTER, if the program does not report how long it waits
TIMES = 2.0  # times as long as others' data
SAME = 0.03  # a difference between the waits of two hosts' data that does not count
MUCH_TRAFFIC = 0.25  # part of the greatest, in bytes
_PARTS = 3


class Look(NamedTuple):
    """One host's view of its connections to another one, over so many seconds before `until`."""

    until: float
    seconds: float
    wait: float  # 0 to 1
    out: float  # bytes a second


class SlowLink(NamedTuple):
    """Data wait from `source` to `peer`, because of `host`, one of both.

    `is_path`: the cause may also lie between the two. `wait` and `others_wait` are parts of the time; the
    rates are bytes a second while data wait.
    """

    host: str
    source: str
    peer: str
    is_path: bool
    share: float
    wait: float
    others_wait: float
    rate: float
    others_rate: float
    is_clear: bool

    @property
    def is_outgoing(self) -> bool:
        return self.host == self.source


Pair = tuple[str, str]  # from, to


class _Traffic(NamedTuple):
    wait: float
    out: float


def find_slow_link(
    looks: Mapping[Pair, Sequence[Look]], *, newest: float, length: float, waiting: float | None
) -> SlowLink | None:
    """Return the link that others wait for, or may still be waiting for; None if there is none.

    `looks`: those of each host at each other one, oldest first. `waiting`: the part of a step in which the
    ranks wait, as far as they report it.
    """
    if waiting is not None and waiting < MUCH_WAITING / 2:
        return None
    whole = _traffic(looks, newest - length, newest)
    busy = _busy(whole)
    if len(busy) < 2:
        return None
    pair = max(busy, key=lambda one: busy[one].wait)
    host, is_path = _at_fault(whole, pair)
    others = _others(whole, busy, pair, host)
    wait, others_wait = whole[pair].wait, median(whole[one].wait for one in others)
    share = wait - others_wait
    if share < LEAVE or wait < TIMES * others_wait:
        return None
    step = length / _PARTS
    ends = [newest - step * place for place in range(_PARTS)]
    is_steady = all(_is_part_slow(_traffic(looks, end - step, end), pair, others) for end in ends)
    least = ALONE if waiting is None else ENTER
    return SlowLink(
        host=host,
        source=pair[0],
        peer=pair[1],
        is_path=is_path,
        share=share,
        wait=wait,
        others_wait=others_wait,
        rate=_rate(whole[pair]),
        others_rate=median(_rate(whole[one]) for one in others),
        is_clear=share >= least and is_steady and (waiting is None or waiting >= MUCH_WAITING),
    )


def _traffic(looks: Mapping[Pair, Sequence[Look]], begins: float, ends: float) -> dict[Pair, _Traffic]:
    """Return the means of looks that end in this time."""
    found = {}
    for pair, rows in looks.items():
        within = [one for one in rows if begins < one.until <= ends]
        seconds = sum(one.seconds for one in within)
        if seconds > 0:
            wait = sum(one.wait * one.seconds for one in within) / seconds
            found[pair] = _Traffic(wait, sum(one.out * one.seconds for one in within) / seconds)
    return found


def _busy(traffic: Mapping[Pair, _Traffic]) -> dict[Pair, _Traffic]:
    """Return the connections with much traffic: data that wait elsewhere hold up no other host."""
    most = max((one.out for one in traffic.values()), default=0.0)
    return {pair: one for pair, one in traffic.items() if 0 < one.out >= MUCH_TRAFFIC * most}


def _at_fault(traffic: Mapping[Pair, _Traffic], pair: Pair) -> tuple[str, bool]:
    """Return of both hosts the one whose other connections wait longer; tell whether they do not differ."""
    means = []
    for host, other in (pair, pair[::-1]):
        waits = [one.wait for key, one in traffic.items() if host in key and other not in key]
        means.append(sum(waits) / len(waits) if waits else 0.0)
    is_same = abs(means[0] - means[1]) < SAME
    return pair[1] if means[1] > means[0] and not is_same else pair[0], is_same


def _others(
    traffic: Mapping[Pair, _Traffic], busy: Mapping[Pair, _Traffic], pair: Pair, host: str
) -> list[Pair]:
    """Return the connections to compare with: of other hosts if there are any, best with traffic."""
    for known in (busy, traffic):
        apart = [one for one in known if host not in one]
        if apart:
            return apart
    return [one for one in busy if one != pair]


def _is_part_slow(part: Mapping[Pair, _Traffic], pair: Pair, others: Sequence[Pair]) -> bool:
    known = [part[one].wait for one in others if one in part]
    return pair in part and bool(known) and part[pair].wait - median(known) >= ENTER_PART


def _rate(one: _Traffic) -> float:
    return one.out / max(one.wait, 1e-3)
