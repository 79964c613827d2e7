"""Which hosts a job that runs should have, and with which it goes on when it has ended for that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.resize import JOINING_S, HostsNow, ResizeRules, next_attempt, resize
from dslaunch.launcher.job.restart import Attempt, Decision
from dslaunch.launcher.job.verdict import Failure, HostFailure, RankFailure, Verdict
from dslaunch.launcher.options.mesh import MeshOptions
from dslaunch.launcher.options.restart import RestartOptions


def selected(names: str) -> tuple[Selected, ...]:
    return tuple(Selected(Host(name=name, slots=2), ("0", "1")) for name in names.split())


def attempt(hosts: str, **fields: Any) -> Attempt:
    return Attempt(run_id="r", hosts=selected(hosts), **fields)


def known(coming: str = "", spares: str = "", **going: str) -> HostsNow:
    return HostsNow(going, selected(coming), selected(spares), {"c": "is back"})


def rules(wanted: int, min_nodes: int | None = None, mesh: dict[str, int] | None = None) -> ResizeRules:
    restart = RestartOptions(min_nodes=min_nodes, max_nodes=wanted, max_restarts=1, min_uptime_s=0.0)
    return ResizeRules(restart, MeshOptions(sizes=tuple((mesh or {}).items())), wanted)


def shown(decision: Decision | None) -> tuple[str, str] | None:
    if decision is None:
        return None
    names = decision.attempt and " ".join(one.host.name for one in decision.attempt.hosts)
    return names or "", decision.why


GONE = "was told to go (x)"


@pytest.mark.parametrize(
    ("hosts", "now", "by", "expected"),
    [
        ("a b", known(), rules(3), None),
        ("a b", known("c"), rules(2), None),
        ("a b", known(spares="c"), rules(3), None),  # it was not tried
        ("a b", known("c"), rules(3), ("a b c", "c is back")),
        ("a b", known("c d"), rules(3), ("a b c", "c is back")),
        ("a b", known("d e"), rules(4), ("a b d e", "d is there, e is there")),
        ("a b c", known(b=GONE), rules(3), ("a c", f"b {GONE}")),
        ("a b c", known(spares="d", b=GONE), rules(3), ("a d c", f"b {GONE}, d is there")),
        ("a b c", known("d e", b=GONE), rules(3), ("a d c", f"b {GONE}, d is there")),
        ("a b c", known(a=GONE, c=GONE), rules(3), ("b", f"a {GONE}, c {GONE}")),
        ("a b", known(x=GONE), rules(3), None),  # of another attempt
        ("a b", known(a=GONE), rules(3, 2), ("", f"a {GONE}: 1 host is left, and --min_nodes is 2")),
        ("a b", known(a=GONE, b=GONE), rules(3),
         ("", f"a {GONE}, b {GONE}: 0 hosts are left, and --min_nodes is 1")),
        # Of a mesh only dp grows and shrinks: four ranks are two hosts.
        ("a b", known("c"), rules(4, mesh={"pp": 4}), None),
        ("a b", known("c d"), rules(4, mesh={"pp": 4}), ("a b c d", "c is back, d is there; with pp=4,dp=2")),
    ],
)  # fmt: skip
def test_the_hosts_that_a_job_should_have(
    hosts: str, now: HostsNow, by: ResizeRules, expected: tuple[str, str] | None
) -> None:
    assert shown(resize(attempt(hosts), now, by)) == expected


def ended(*failures: Failure, change: str = "", ran_s: float | None = 5.0, **leaving: str) -> Verdict:
    return Verdict(
        culprit=failures[0] if failures else None,
        others=failures[1:],
        interrupted_by=None,
        phases_s=(),
        ran_s=ran_s,
        change=change,
        leaving=leaving,
    )


def trained(*failures: Failure) -> Verdict:
    return ended(*failures)._replace(has_trained=True)


def rank_of(host: str) -> RankFailure:
    return RankFailure(rank=3, local_rank=0, host=host, pid=1, code=1, signal=0, at_s=9.0)


def lost(host: str) -> HostFailure:
    return HostFailure(host=host, message="lost", at_s=9.0)


RANK = "rank 3 on a (local rank 0, pid 1) exited with code 1"
FREE = "starting again, which counts as no restart"


@pytest.mark.parametrize(
    ("verdict", "now", "joined", "expected", "num_restarts"),
    [
        (ended(change="c is back"), known("c"), "",
         ("a b c", "3 hosts from now on (c is back): starting again from where it was saved"), 0),
        (ended(change="c is back"), known(), "",
         ("a b", "the hosts stay as they are, after all: starting again from where it was saved"), 0),
        (ended(lost("b"), b="x"), known(b=GONE), "", ("a", f"{FREE}; without b (told to go: x)"), 0),
        (ended(rank_of("b"), b="x"), known(b=GONE), "", ("a", f"{FREE}; without b (told to go: x)"), 0),
        (ended(rank_of("a"), b="x"), known(b=GONE), "",
         ("a", f"starting again (1 of 1 restarts); without b ({GONE})"), 1),
        (ended(lost("b")), known(), "b", ("a", f"{FREE}; without b (it had just joined: b: lost)"), 0),
        (ended(lost("b"), ran_s=None), known(), "b",
         ("a", f"{FREE}; without b (it had just joined: b: lost)"), 0),
        # Another one failed with it; and before it had joined the job ran.
        (ended(rank_of("a")), known(), "b", ("a", f"{FREE}; without b (it had just joined: {RANK})"), 0),
        # Of several that have joined one is lost, or fails in training: the others are good.
        (ended(lost("b")), known(), "a b", ("a", f"{FREE}; without b (it had just joined: b: lost)"), 0),
        (trained(rank_of("a")), known(), "a b", ("b", f"{FREE}; without a (it had just joined: {RANK})"), 0),
        (trained(rank_of("a")), known(), "b", ("a b", "starting again (1 of 1 restarts)"), 1),
        # Both are one machine, which is said of the one that is heard of later.
        (ended(lost("a")._replace(exit_code=2), ran_s=None), known(), "b",
         ("a", f"{FREE}; without b (it had just joined: a: lost)"), 0),
        (ended(lost("a")), known(), "b",
         ("a b", "starting again (1 of 1 restarts); with a again (lost), for there is no spare"), 1),
        (ended(lost("b"), ran_s=JOINING_S + 1), known(), "b",
         ("a b", "starting again (1 of 1 restarts); with b again (lost), for there is no spare"), 1),
        (ended(lost("b")), known("c"), "",
         ("a c", "starting again (1 of 1 restarts); c instead of b (lost)"), 1),
        (ended(), known("c"), "", ("", ""), 0),
        (ended(change="c is back")._replace(interrupted_by=2), known("c"), "", ("", ""), 0),
    ],
)  # fmt: skip
def test_what_comes_after_an_attempt(
    verdict: Verdict, now: HostsNow, joined: str, expected: tuple[str, str], num_restarts: int
) -> None:
    decision = next_attempt(attempt("a b", joined=frozenset(joined.split())), verdict, now, rules(3))
    assert shown(decision) == expected
    if decision.attempt is not None:
        assert (decision.attempt.number, decision.attempt.num_restarts) == (1, num_restarts)


def test_hosts_that_joined_with_one_that_was_lost_have_still_just_joined() -> None:
    before = attempt("a b c", joined=frozenset("bc"))
    decision = next_attempt(before, ended(lost("b")), known(), rules(3))
    assert decision.attempt is not None
    assert decision.attempt.joined == {"c"}


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(hosts=NAMES.filter(bool), coming=NAMES, spares=NAMES, going=st.sets(st.sampled_from("abcdefgh")),
       wanted=st.integers(1, 8), min_nodes=st.none() | st.integers(1, 4))  # fmt: skip
def test_no_host_twice_none_that_goes_no_more_than_wanted_and_those_that_stay_in_their_order(
    hosts: list[str],
    coming: list[str],
    spares: list[str],
    going: set[str],
    wanted: int,
    min_nodes: int | None,
) -> None:
    coming = [one for one in coming if one not in hosts and one not in going]
    spares = [one for one in spares if one not in hosts and one not in going and one not in coming]
    before = attempt(" ".join(hosts))
    now = known(" ".join(coming), " ".join(spares), **dict.fromkeys(going, GONE))
    decision = resize(before, now, rules(wanted, min_nodes))
    if decision is None or decision.attempt is None:
        assert decision is None or going
        return
    after = [one.host.name for one in decision.attempt.hosts]
    staying = [name for name in hosts if name not in going]
    assert len(set(after)) == len(after)
    assert not going & set(after)
    assert [name for name in after if name in hosts] == staying
    assert len(after) <= max(wanted, len(hosts))
    assert decision.attempt.joined == set(after) - set(hosts)
    settled = known(" ".join(one for one in coming if one not in after))
    assert resize(decision.attempt, settled, rules(wanted, min_nodes)) is None, "it has the right hosts now"
