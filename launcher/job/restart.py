"""The decision after a failure: end, or start again, and with which hosts. Arithmetic only.

A spare takes the place, and so the ranks, of a host that could not be used or was lost; without a spare the
hosts behind it move up, if --min_nodes allows fewer; otherwise a lost host is tried once more, because it
may be back. A host whose ranks failed first twice in a row is replaced too, if there is a spare; one for
whose ranks the others waited in vain twice in a row is left out like a lost one. A job whose ranks fail right
after the start is not started again: it would fail again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.selection import Selected
from ..options.restart import RestartOptions
from ..wording import count
from .roles import Server
from .verdict import HangFailure, HostFailure, OutputFailure, RankFailure, Verdict


class Attempt(NamedTuple):
    """One start of the job: its hosts in rank order, the spares that are left, and the number of starts
    before.

    `num_restarts` counts restarts after the job had run. A start whose hosts could not be used does not
    count.
    """

    run_id: str  # the same for all attempts of one command
    hosts: tuple[Selected, ...]
    spares: tuple[Selected, ...] = ()
    number: int = 0
    num_restarts: int = 0
    last_culprit: str | None = None  # the host whose rank failed first
    hosts_from: str = ""  # the file or variable that named the hosts, if the user did not
    joined: frozenset[str] = frozenset()  # the hosts that joined the job with this attempt
    servers: tuple[Server, ...] = ()  # the same in all attempts


class Decision(NamedTuple):
    """The next step: another attempt or, if that is None, the end.

    `why` is one sentence, empty if there is nothing to report.
    """

    attempt: Attempt | None
    why: str


def first_attempt(
    selected: tuple[Selected, ...], options: RestartOptions, *, num_nodes: int, run_id: str
) -> Attempt:
    """Divide the chosen hosts into those that take part and the spares.

    `num_nodes` below 1 means not given; then --max_nodes, or all but the --spares, take part.
    Errors: LaunchError if there are fewer spares than were asked for
    """
    wanted = num_nodes if num_nodes > 0 else options.max_nodes
    num_free = len(selected) - (wanted or 1)
    if options.spares > max(0, num_free):
        raise LaunchError(
            f"--spares={options.spares}: {count(len(selected), 'host')} can take part, and "
            f"{wanted or 'at least 1'} of them must run the job; give at most {max(0, num_free)}, or add "
            "lines to the hostfile"
        )
    if wanted is None:
        wanted = len(selected) - options.spares
    rest = selected[wanted:]
    num_spares = len(rest) if options.max_nodes is not None else options.spares
    return Attempt(run_id=run_id, hosts=selected[:wanted], spares=rest[:num_spares])


def decide(attempt: Attempt, verdict: Verdict, options: RestartOptions) -> Decision:
    """Return the next attempt after `verdict`, or why there is none."""
    if verdict.exit_code == 0 or verdict.interrupted_by is not None or not options.is_on:
        return Decision(attempt=None, why="")
    if isinstance(verdict.culprit, OutputFailure):
        return Decision(attempt=None, why="")
    bad = _bad_hosts(attempt, verdict, may_shrink=options.min_nodes is not None)
    had_run = verdict.ran_s is not None
    if had_run and attempt.num_restarts >= options.max_restarts:
        return Decision(attempt=None, why=f"not started again: {_used(options.max_restarts)}")
    if had_run and not bad and (verdict.ran_s or 0.0) < options.min_uptime_s:
        return Decision(
            attempt=None,
            why=f"not started again: it failed {verdict.ran_s:.1f} s after the start, and --min_uptime is "
            f"{options.min_uptime_s:g} s",
        )
    if not had_run and not bad:
        # A mistake of the user, such as a missing script: it would fail again
        return Decision(attempt=None, why="")
    return _without(attempt, bad, verdict, options, had_run=had_run)


def without_unfit(attempt: Attempt, unfit: dict[str, str], options: RestartOptions) -> Decision:
    """Return the same attempt without unfit hosts and spares; None if too few are left. `unfit` has the
    names and reasons that a check before the start found.

    No worker has started, so this is no restart.
    """
    # Without the advice, which was printed
    unfit = {name: reason.partition(";")[0] for name, reason in unfit.items()}
    for one in attempt.servers:
        if one.host.host.name in unfit:
            name, why = one.host.host.name, unfit[one.host.host.name]
            return Decision(
                attempt=None,
                why=f"not started: {name}, which has the role {one.role.name}, cannot be used ({why})",
            )
    hosts, spares, changes = replace_hosts(attempt, unfit, keeps_lost=False)
    changes += [
        f"without the spare {one.host.name} ({unfit[one.host.name]})"
        for one in attempt.spares
        if one.host.name in unfit
    ]
    minimum = len(attempt.hosts) if options.min_nodes is None else options.min_nodes
    if len(hosts) < max(1, minimum):
        left = f"{len(hosts)} of {count(len(attempt.hosts), 'host')}"
        why = (
            f"not started: {left} can be used, and there is no spare"
            if options.min_nodes is None
            else f"not started: {left} can be used, and --min_nodes is {minimum}"
        )
        return Decision(attempt=None, why=why)
    why = f"starting {', '.join(changes)}"
    return Decision(attempt=attempt._replace(hosts=hosts, spares=spares), why=why)


def _without(
    attempt: Attempt, bad: dict[str, str], verdict: Verdict, options: RestartOptions, *, had_run: bool
) -> Decision:
    hosts, spares, changes = replace_hosts(attempt, bad, keeps_lost=had_run and options.min_nodes is None)
    minimum = len(attempt.hosts) if options.min_nodes is None else options.min_nodes
    if len(hosts) < max(1, minimum):
        why = (
            f"not started again: {len(hosts)} of {len(attempt.hosts)} hosts are left and no spare"
            if options.min_nodes is None
            else f"not started again: {len(hosts)} hosts are left, and --min_nodes is {minimum}"
        )
        return Decision(attempt=None, why=why)
    culprit = verdict.culprit
    following = attempt._replace(
        hosts=hosts,
        spares=spares,
        number=attempt.number + 1,
        num_restarts=attempt.num_restarts + had_run,
        last_culprit=culprit.host if isinstance(culprit, RankFailure | HangFailure) else None,
        joined=frozenset(),
    )
    what = f"starting again ({following.num_restarts} of {options.max_restarts} restarts)"
    return Decision(
        attempt=following, why="; ".join([what if had_run else "starting with other hosts", *changes])
    )


def _bad_hosts(attempt: Attempt, verdict: Verdict, *, may_shrink: bool) -> dict[str, str]:
    """Return the hosts that must not take part again, each with the reason."""
    failures = [one for one in (verdict.culprit, *verdict.others) if one is not None]
    bad = {
        one.host: one.message
        for one in failures
        if isinstance(one, HostFailure) and one.is_host_at_fault and one.host not in _server_hosts(attempt)
    }
    culprit = verdict.culprit
    is_again = isinstance(culprit, RankFailure) and culprit.host == attempt.last_culprit
    if isinstance(culprit, RankFailure) and is_again and attempt.spares and not culprit.role:
        bad[culprit.host] = "its ranks failed first twice in a row"
    is_hang_again = isinstance(culprit, HangFailure) and culprit.host and culprit.host == attempt.last_culprit
    if isinstance(culprit, HangFailure) and is_hang_again and (attempt.spares or may_shrink):
        bad[culprit.host] = "the others waited for its ranks in vain twice in a row"
    return bad


def _server_hosts(attempt: Attempt) -> set[str]:
    """Return the hosts of servers, which no spare replaces."""
    return {one.host.host.name for one in attempt.servers}


def replace_hosts(
    attempt: Attempt, bad: Mapping[str, str], *, keeps_lost: bool
) -> tuple[tuple[Selected, ...], tuple[Selected, ...], list[str]]:
    """Put spares in the places of bad hosts; if no spare is left, the following hosts move up."""
    spares = [one for one in attempt.spares if one.host.name not in bad]
    hosts: list[Selected] = []
    changes: list[str] = []
    for one in attempt.hosts:
        name = one.host.name
        if name not in bad:
            hosts.append(one)
            continue
        fitting = next((spare for spare in spares if len(spare.devices) == len(one.devices)), None)
        instead = fitting or (spares[0] if spares else None)
        if instead is None and keeps_lost:
            hosts.append(one)
            changes.append(f"with {name} again ({bad[name]}), for there is no spare")
            continue
        if instead is None:
            changes.append(f"without {name} ({bad[name]})")
            continue
        spares.remove(instead)
        hosts.append(instead)
        changes.append(f"{instead.host.name} instead of {name} ({bad[name]})")
    return tuple(hosts), tuple(spares), changes


def _used(max_restarts: int) -> str:
    if max_restarts == 0:
        return "--max_restarts is 0"
    return f"all {max_restarts} restarts are used" if max_restarts > 1 else "the one restart is used"
