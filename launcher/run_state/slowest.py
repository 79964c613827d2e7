"""The rank that others wait for, and why: from an event that says it, else from the times of the ranks."""

from __future__ import annotations

from typing import NamedTuple

from .run_state import RunState
from .step_times import StepTimes

LEAD = 0.1  # of a step: with less, the ranks are as fast as each other


class Slowest(NamedTuple):
    """`why` is a sentence without its end. `is_said` if an event has named it: then that one is whole."""

    rank: int
    host: str
    cause: str
    why: str
    is_said: bool = False


def slowest(state: RunState) -> Slowest | None:
    """None if no rank is slower than the others, or that is not known."""
    said = max(state.present_stragglers.values(), key=lambda one: (one.share, one.at), default=None)
    if said is not None:
        why = said.text or _shown(said.share, said.cause)
        return Slowest(said.rank, said.host, said.cause, why, is_said=bool(said.text))
    return _of_folded(state) if state.folded else _of_ranks(state)


def _of_ranks(state: RunState) -> Slowest | None:
    """The rank whose time of its own is greatest, if the others wait for it."""
    told = {
        rank: one.times
        for rank, one in state.ranks.items()
        if one.times is not None and one.exit_code is None and not one.doing
    }
    if len(told) < 2:
        return None
    first = max(told, key=lambda rank: told[rank].own_s)
    others = [times for rank, times in told.items() if rank != first]
    share = (told[first].own_s - _median([one.own_s for one in others])) / max(1e-9, told[first].step_s)
    if share < LEAD or told[first].comm_s > min(one.comm_s for one in others):
        return None
    cause = _cause(told[first], others)
    return Slowest(first, state.ranks[first].host, cause, _shown(share, cause))


def _of_folded(state: RunState) -> Slowest | None:
    """The rank that does most itself, of which its host tells."""
    told = {host: one.per_step("own_s") for host, one in state.folded.items()}
    known = {host: one for host, one in told.items() if one is not None}
    if not known or state.step_s is None:
        return None
    host = max(known, key=lambda one: known[one].most)
    step_s = max(1e-9, state.step_s)
    share = (known[host].most - _median([one.mean for one in known.values()])) / step_s
    paused = state.folded[host].per_step("paused_s")
    if share < LEAD or (paused is not None and paused.most / step_s >= LEAD):
        return None  # to save is in a rank's own time, too
    data = state.folded[host].per_step("data_s")
    is_data = data is not None and (data.most - data.mean) / step_s >= share / 2
    cause = "data" if is_data else "compute"
    return Slowest(known[host].rank_of_most, host, cause, _shown(share, cause))


def _cause(times: StepTimes, others: list[StepTimes]) -> str:
    more_data_s = times.data_s - _median([one.data_s for one in others])
    more_own_s = times.own_s - _median([one.own_s for one in others])
    return "data" if more_data_s >= more_own_s / 2 else "compute"


def _shown(share: float, cause: str) -> str:
    words = {
        "data": "it is late between two steps (its data, or its own code there)",
        "compute": "it computes longer",
        "link": "its network is slow",
    }
    return f"others wait {share * 100:.0f} % of a step for it: {words.get(cause, cause)}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
