"""Ways out for a job that does not fit: searched by bounds, and confirmed by a rehearsal or two."""

from __future__ import annotations

from dataclasses import replace

from ..errors import LaunchError
from ..fit.candidates import Candidate
from ..fit.finding import FitFinding
from ..fit.suggestion import Suggestions, Tried
from ..fit.ways_out import WayOut, changes_of
from .plan_job import PlannedJob
from .search_job import Attempted, Search, config_of

MOST_TRIED = 2  # changes of the configuration that are rehearsed
_HINT = "--suggest rehearses more: all stages, offload, micro batches, checkpointing and meshes"


def with_ways_out(job: PlannedJob, found: FitFinding, suggested: Suggestions | None = None) -> FitFinding:
    """Return the finding of a job that does not fit with what would: the cheapest change of its
    configuration, or the best one that was suggested, and the smallest number of hosts.
    """
    notes = found.verdict.notes
    try:
        config = config_of(job)
    except LaunchError as error:
        config = None
        notes = (*notes, f"not searched: other configurations, because {error}")
    search = Search(job, found, config=config)
    if suggested is None:
        ways = _searched(search)
    else:
        best = suggested.best
        ways = [None if best is None else search.way_out(best), suggested.hosts or search.more_hosts()]
    ways_out = tuple(one for one in ways if one is not None)
    if not ways_out and suggested is None and config is not None:
        notes = (*notes, _HINT)
    return replace(found, verdict=replace(found.verdict, notes=notes), given=search.given, ways_out=ways_out)


def _searched(search: Search) -> list[WayOut | None]:
    """Return the configuration that fits with the fewest changes and the least time, and the hosts."""
    seconds = {
        one: search.seconds(one) for one in search.configurations(has_meshes=False) if one != search.given
    }
    order = sorted(seconds, key=lambda one: (len(changes_of(search.given, one)), seconds[one]))
    change, hosts = _next(search, order), search.expected_hosts()
    attempts = [*([] if change is None else [Attempted(change)]), *([] if hosts is None else [hosts])]
    results = search.rehearse(attempts, is_fullest_enough=True)
    return [
        None if change is None else _change(search, order, results[0]),
        None if hosts is None else search.on_hosts(hosts, results[-1]),
    ]


def _change(search: Search, order: list[Candidate], first: Tried) -> WayOut | None:
    """Return the first change that fits, or by its bounds a further one."""
    if first.finding is None and not search.has_time():
        return search.way_out(first)
    tried = [first]
    while not tried[-1].fits_at_all:
        change = _next(search, [one for one in order if all(one != other.candidate for other in tried)])
        if change is None:
            return None
        if len(tried) == MOST_TRIED or not search.has_time():
            return search.way_out(Tried(candidate=change, finding=None))
        tried += search.rehearse([Attempted(change)], is_fullest_enough=True)
    return search.way_out(tried[-1])


def _next(search: Search, order: list[Candidate]) -> Candidate | None:
    """Return the first in this order that should fit."""
    forecast = search.forecast
    return next((one for one in order if forecast.room.holds(forecast.expected(one))), None)
