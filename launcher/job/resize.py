"""The hosts that a running job should have, and the hosts of the next attempt after an end for a change of
hosts. Arithmetic only.

A change of hosts is no failure: it counts as no restart and is not held to --min_uptime. A failure of a host
that was told to go, or that has just joined, does not count either: the job goes on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..inputs.selection import Selected
from ..options.mesh import MeshOptions
from ..options.restart import RestartOptions
from ..wording import count
from .mesh import fit
from .restart import Attempt, Decision, decide, replace_hosts
from .verdict import HostFailure, RankFailure, Verdict

# If the job fails within this time after a start, the hosts that joined at this start are left out again
JOINING_S = 60.0


class HostsNow(NamedTuple):
    """The known hosts now. `coming` and `spares` are hosts that are not in the attempt, in the order in
    which they would be taken.
    """

    going: Mapping[str, str]  # hosts of the attempt that leave, each with the reason
    coming: tuple[Selected, ...]  # hosts that were just tried and can be used
    spares: tuple[Selected, ...]  # hosts that were not tried; they only replace others
    words: Mapping[str, str]  # a description of each host that comes, e.g. "is back"


class ResizeRules(NamedTuple):
    """The options for a change. `wanted` is the number of hosts of the whole job."""

    restart: RestartOptions
    mesh: MeshOptions
    wanted: int

    @property
    def minimum(self) -> int:
        """Smallest number of hosts with which the job goes on, if some must leave."""
        return max(1, self.restart.min_nodes or 1)


def resize(attempt: Attempt, known: HostsNow, rules: ResizeRules) -> Decision | None:
    """Return the attempt with the hosts that the job should have now; None if it has them. A Decision
    without an attempt means that too few hosts are left, so the job must save and end.
    """
    going = {name: why for name, why in known.going.items() if name in _names(attempt.hosts)}
    if not going and (not known.coming or len(attempt.hosts) >= rules.wanted):
        return None
    pool = attempt._replace(spares=known.coming + known.spares)
    hosts, left, _ = replace_hosts(pool, going, keeps_lost=False)
    more = [one for one in left if one in known.coming][: max(0, rules.wanted - len(hosts))]
    hosts, left = (*hosts, *more), tuple(one for one in left if one not in more)
    why = _why(attempt, hosts, going, known)
    if len(hosts) < rules.minimum:
        return Decision(None, f"{why}: {_too_few(len(hosts), rules)}")
    before = _names(attempt.hosts)
    following = attempt._replace(hosts=hosts, spares=left, number=attempt.number + 1, last_culprit=None)
    fitting = fit(Decision(following, why), rules.mesh, rules.restart._replace(min_nodes=rules.minimum))
    if fitting.attempt is None:
        return fitting if going else None
    after = _names(fitting.attempt.hosts)
    if not going and (after == before or len(after) <= len(before)):
        return None
    joined = frozenset(after) - frozenset(before)
    return fitting._replace(attempt=fitting.attempt._replace(joined=joined))


def next_attempt(attempt: Attempt, verdict: Verdict, known: HostsNow, rules: ResizeRules) -> Decision:
    """Decide what follows the end of an attempt, for a change of hosts or for another reason."""
    if verdict.exit_code == 0 or verdict.interrupted_by is not None:
        return Decision(None, "")
    if verdict.change:
        return _after_change(attempt, known, rules)
    attempt = attempt._replace(spares=known.coming + known.spares)
    forgiven = _forgiven(attempt, verdict)
    if forgiven:
        hosts, spares, changes = replace_hosts(attempt, {**known.going, **forgiven}, keeps_lost=False)
        changes = ["starting again, which counts as no restart", *changes]
        joined = attempt.joined.difference(forgiven)
        following = attempt._replace(
            hosts=hosts, spares=spares, number=attempt.number + 1, last_culprit=None, joined=joined
        )
        restart = rules.restart._replace(min_nodes=rules.minimum)
        if len(hosts) >= rules.minimum:
            return fit(Decision(following, "; ".join(changes)), rules.mesh, restart)
        if verdict.leaving:
            return Decision(None, f"not started again: {_too_few(len(hosts), rules)}")
    hosts, spares, changes = replace_hosts(attempt, known.going, keeps_lost=False)
    decision = decide(attempt._replace(hosts=hosts, spares=spares), verdict, rules.restart)
    if decision.attempt is not None:
        decision = decision._replace(why="; ".join([decision.why, *changes]))
    return fit(decision, rules.mesh, rules.restart)


def _after_change(attempt: Attempt, known: HostsNow, rules: ResizeRules) -> Decision:
    decision = resize(attempt, known, rules)
    if decision is None:  # no change is needed any more: the hosts that were to join have gone again
        following = attempt._replace(number=attempt.number + 1, joined=frozenset())
        why = "the hosts stay as they are, after all: starting again from where it was saved"
        return Decision(following, why)
    if decision.attempt is None:
        return decision._replace(why=f"{decision.why}; it has saved, and ends")
    num = count(len(decision.attempt.hosts), "host")
    return decision._replace(
        why=f"{num} from now on ({decision.why}): starting again from where it was saved"
    )


def _forgiven(attempt: Attempt, verdict: Verdict) -> dict[str, str]:
    """If the first failure is the fault of a host that was told to go or has just joined, return the hosts
    without which the job goes on; the restart is not counted.
    """
    culprit = verdict.culprit
    if not isinstance(culprit, HostFailure | RankFailure):
        return {}
    leaving = {name: f"told to go: {why}" for name, why in verdict.leaving.items()}
    if culprit.host in leaving:
        return leaving
    is_of_old_host = (
        isinstance(culprit, HostFailure)
        and culprit.host not in attempt.joined
        and (culprit.is_host_at_fault or verdict.ran_s is not None)
    )
    if not attempt.joined or (verdict.ran_s or 0.0) > JOINING_S or is_of_old_host:
        return {}
    is_its_own = isinstance(culprit, HostFailure) or verdict.has_trained
    if is_its_own and culprit.host in attempt.joined:
        guilty = [culprit.host]
    elif verdict.has_trained:
        return {}
    else:  # it ran without the new hosts and fails with them: perhaps the ranks do not divide the batch
        guilty = sorted(attempt.joined)
    return leaving | {name: f"it had just joined: {culprit.describe()}" for name in guilty}


def _why(attempt: Attempt, hosts: tuple[Selected, ...], going: Mapping[str, str], known: HostsNow) -> str:
    after = _names(hosts)
    joined = [name for name in after if name not in _names(attempt.hosts)]
    words = [f"{name} {why}" for name, why in going.items()]
    return ", ".join([*words, *(f"{name} {known.words.get(name, 'is there')}" for name in joined)])


def _too_few(num_hosts: int, rules: ResizeRules) -> str:
    are = "host is" if num_hosts == 1 else "hosts are"
    return f"{num_hosts} {are} left, and --min_nodes is {rules.minimum}"


def _names(hosts: tuple[Selected, ...]) -> tuple[str, ...]:
    return tuple(one.host.name for one in hosts)
