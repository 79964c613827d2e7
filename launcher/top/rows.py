"""The rows of the table: ranks or hosts, the state of each, and what it waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..run_state.metric_table import DATA, GPU, GPU_PREFIX, HOST, RANK, WAITING, Metric
from ..run_state.rank_state import HostNumbers, NumberSource, RankState
from ..run_state.run_state import RunState, Straggler
from ..run_state.step_times import StepTimes
from .amounts import shown_share

MAX_RANKS = 64  # from this number on hosts are shown, whose ranks are reported together
WORTH_SAYING = 0.05  # part of a step: less waiting is not named
QUIET_S = 10.0  # without a step, and ten times as long as one
_DEAD_WORDS = {9: "SIGKILL", 11: "SIGSEGV", 6: "SIGABRT", 15: "SIGTERM", 7: "SIGBUS", 2: "SIGINT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRow:
    """One rank or one host; None for values without a report. `key` is its place in the job."""

    key: int
    name: str
    host: str
    state: str
    state_style: str = ""
    step: int | None = None
    times: StepTimes | None = None
    mem_share: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # by the titles of their columns
    net: float | None = None  # bytes a second, in and out
    lines_per_s: float | None = None
    waits: str = ""
    waits_style: str = ""
    is_slowest: bool = False


def _with_column(table: Mapping[str, Metric]) -> dict[str, Metric]:
    return {name: one for name, one in table.items() if one.column}


_OF_RANK, _OF_HOST, _OF_GPU = map(_with_column, (RANK, HOST, GPU))
COLUMNS = {one.column: one for table in (_OF_RANK, _OF_GPU, _OF_HOST) for one in table.values()}


def _numbers(
    sources: Sequence[NumberSource], host: HostNumbers | None, gpu: Mapping[str, float]
) -> dict[str, float]:
    """Return the numbers of the columns: of ranks the greatest, of their host, and of GPUs."""
    found = {}
    for name, metric in _OF_RANK.items():
        told = [value for one in sources if (value := one.value(name)) is not None]
        if told:
            found[metric.column] = max(told)
    for table, values in ((_OF_HOST, {} if host is None else host.values), (_OF_GPU, gpu)):
        found.update({metric.column: values[name] for name, metric in table.items() if name in values})
    return found


def is_by_hosts(state: RunState, by: str) -> bool:
    """Tell whether the table shows hosts."""
    if state.folded or not state.ranks:
        return True
    return by == "hosts" or (by == "" and len(state.ranks) > MAX_RANKS)


def rank_rows(state: RunState, slow: Straggler | None, now: float) -> list[TopRow]:
    """Return one row for each rank, then one for each server. `now` is infinite if the job has ended."""
    num_on_host: dict[str, int] = {}
    for one in state.ranks.values():
        num_on_host[one.host] = num_on_host.get(one.host, 0) + 1
    rows = [_rank_row(state, rank, slow, num_on_host[rank.host], now) for rank in state.ranks.values()]
    return rows + [_server_row(state, one, now) for one in state.servers.values()]


def _server_row(state: RunState, server: RankState, now: float) -> TopRow:
    host = state.hosts.get(server.host)
    word, style = _state_of_server(server, now)
    return TopRow(
        key=server.rank,
        name=server.role,
        host=server.host,
        state=word,
        state_style=style,
        mem_share=None if host is None else host.mem_share,
        numbers=_numbers([], host, {} if host is None else _of_gpus(host.values)),
        lines_per_s=server.lines_per_s,
    )


def _of_gpus(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of all GPUs of a host, together."""
    return {name: values[GPU_PREFIX + name] for name in GPU if GPU_PREFIX + name in values}


def _state_of_server(server: RankState, now: float) -> tuple[str, str]:
    """Return a word for its state, and its style."""
    if server.exit_code is not None and math.isfinite(now):
        return (f"exit {server.exit_code}", "bad") if server.exit_code else ("done", "dim")
    if math.isinf(now):
        return "ended", "dim"
    if server.is_healthy:
        return "serving", "good"
    return ("again", "warn") if server.num_restarts else ("starting", "dim")


def _rank_row(
    state: RunState, rank: RankState, slow: Straggler | None, num_on_host: int, now: float
) -> TopRow:
    host = state.hosts.get(rank.host)
    word, style = _state_of(rank, state, now)
    is_slowest = slow is not None and slow.rank == rank.rank
    waits, waits_style = ("", "")
    if rank.times is not None and rank.exit_code is None and not rank.doing and math.isfinite(now):
        waits, waits_style = _waits(rank.times, None if is_slowest else slow)
    if is_slowest and not waits:
        waits, waits_style = "others wait", "warn"
    gpu: Mapping[str, float] = {}
    gpus = [] if host is None else host.gpus
    if len(gpus) == num_on_host and rank.local_rank < num_on_host:
        gpu = gpus[rank.local_rank]  # otherwise its GPU is not known
    return TopRow(
        key=rank.rank,
        name=str(rank.rank),
        host=rank.host,
        state=word,
        state_style=style,
        step=rank.step,
        times=rank.times,
        mem_share=rank.mem_share,
        numbers=_numbers([rank], host, gpu),
        lines_per_s=rank.lines_per_s,
        waits=waits,
        waits_style=waits_style,
        is_slowest=is_slowest,
    )


def host_rows(state: RunState, slow: Straggler | None, now: float) -> list[TopRow]:
    """Return one row for each host, then one for each server."""
    by_host: dict[str, list[RankState]] = {host: [] for host in state.hosts}
    for one in state.ranks.values():
        by_host.setdefault(one.host, []).append(one)
    servers = [_server_row(state, one, now) for one in state.servers.values()]
    for row in servers:
        by_host.pop(row.host, None)
    rows = [
        _host_row(place, state, host, ranks, slow, now) for place, (host, ranks) in enumerate(by_host.items())
    ]
    return rows + servers


def _host_row(
    place: int, state: RunState, name: str, ranks: list[RankState], slow: Straggler | None, now: float
) -> TopRow:
    host = state.hosts.get(name, HostNumbers(name))
    folded = state.folded.get(name)
    sources = [*ranks, *([] if folded is None else [folded])]
    times = StepTimes.mean([one.times for one in sources if one.times is not None])
    steps = [one.step for one in sources if one.step is not None]
    shares = [one.mem_share for one in sources if one.mem_share is not None]
    its_own = host.values
    gpus = _of_gpus(its_own)
    word, style = _state_of_host(ranks, state, now, 0.0 if folded is None else folded.step_at)
    is_slowest = slow is not None and slow.host == name
    waits, waits_style = ("", "")
    if times is not None and math.isfinite(now):
        waits, waits_style = _waits(times, None if is_slowest else slow)
    if is_slowest and slow is not None:
        waits, waits_style = f"has rank {slow.rank}", "warn"
    net = [its_own[one] for one in ("net_in", "net_out") if one in its_own]
    return TopRow(
        key=place,
        name=str(len(ranks)),
        host=name,
        state=word,
        state_style=style,
        step=min(steps, default=None),
        times=times,
        mem_share=max(shares, default=host.mem_share),
        numbers=_numbers(sources, host, gpus),
        net=sum(net) if net else None,
        lines_per_s=sum(one.lines_per_s for one in ranks),
        waits=waits,
        waits_style=waits_style,
        is_slowest=is_slowest,
    )


def _state_of(rank: RankState, state: RunState, now: float) -> tuple[str, str]:
    """Return a word for its state, and its style."""
    if rank.exit_code is not None:
        if rank.signal:
            return _DEAD_WORDS.get(rank.signal, f"signal {rank.signal}"), "bad"
        return (f"exit {rank.exit_code}", "bad") if rank.exit_code else ("done", "dim")
    if math.isinf(now):
        return "gone", "dim"
    if not rank.pid:
        return "starting", "dim"
    if rank.has_hang:
        return "hangs", "bad"
    if rank.doing:
        return rank.doing, ""
    if is_quiet(rank.step_at, state, now):
        return "no step", "warn"
    return ("training", "good") if rank.step_at else ("running", "good")


def _state_of_host(ranks: list[RankState], state: RunState, now: float, step_at: float) -> tuple[str, str]:
    """Return the worst state of its ranks, with the number of ranks in it."""
    found: dict[tuple[str, str], int] = {}
    for one in ranks:
        word = _state_of(one, state, now)
        found[word] = found.get(word, 0) + 1
    if not found:
        return "", ""
    worst = min(found, key=lambda one: ("bad", "warn", "", "dim", "good").index(one[1]))
    if step_at and worst == ("running", "good"):  # the ranks are reported together
        worst = ("no step", "warn") if is_quiet(step_at, state, now) else ("training", "good")
        return worst
    num = found[worst]
    return (worst[0] if num == len(ranks) else f"{num} {worst[0]}"), worst[1]


def is_quiet(step_at: float, state: RunState, now: float) -> bool:
    """Tell whether a step is long overdue. In a job that has ended none is."""
    if not step_at or state.exit_code is not None:
        return False
    return now - step_at > max(QUIET_S, 10 * (state.step_s or 0.0))


def _waits(times: StepTimes, slow: Straggler | None) -> tuple[str, str]:
    whole_s = max(times.step_s, 1e-9)
    comm, data = (min(1.0, times.of(kind) / whole_s) for kind in (WAITING, DATA))
    if max(comm, data) < WORTH_SAYING:
        return "", ""
    if data > comm:
        return f"data {shown_share(data)}", "warn" if data > 2 * WORTH_SAYING else ""
    who = "others" if slow is None else f"rank {slow.rank}"
    return f"{who} {shown_share(comm)}", ""
