"""What a job does after a failure: which hosts the next attempt has, and when there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.restart import Attempt, Decision, decide, first_attempt, without_unfit
from dslaunch.launcher.job.verdict import (
    Failure,
    HangFailure,
    HostFailure,
    OutputFailure,
    RankFailure,
    Verdict,
)
from dslaunch.launcher.options.option import read
from dslaunch.launcher.options.restart import ELASTIC_RESTARTS, RestartOptions


def selected(*names: str, slots: int = 2) -> tuple[Selected, ...]:
    devices = tuple(str(slot) for slot in range(slots))
    return tuple(Selected(host=Host(name=name, slots=slots), devices=devices) for name in names)


def names(hosts: tuple[Selected, ...]) -> str:
    return " ".join(one.host.name for one in hosts)


def attempt(hosts: str, spares: str = "", **fields: object) -> Attempt:
    return Attempt(run_id="r", hosts=selected(*hosts.split()), spares=selected(*spares.split()), **fields)  # type: ignore[arg-type]


def rank_failed(host: str) -> RankFailure:
    return RankFailure(rank=0, local_rank=0, host=host, pid=1, code=1, signal=0, at_s=9.0, last_lines=())


def host_failed(host: str, exit_code: int = 3) -> HostFailure:
    return HostFailure(host=host, message="lost", at_s=9.0, exit_code=exit_code)


def ended(*failures: Failure, ran_s: float | None = 60.0, interrupted_by: int | None = None) -> Verdict:
    return Verdict(
        culprit=failures[0] if failures else None,
        others=failures[1:],
        interrupted_by=interrupted_by,
        phases_s=(),
        ran_s=ran_s,
    )


ON = RestartOptions(max_restarts=3)


def shown(decision: Decision) -> tuple[str, str, str]:
    following = decision.attempt
    return (
        (names(following.hosts), names(following.spares), decision.why)
        if following
        else ("", "", decision.why)
    )


@pytest.mark.parametrize(
    ("options", "num_nodes", "expected"),
    [
        (RestartOptions(max_restarts=1), -1, ("a b c d", "")),
        (RestartOptions(max_restarts=1), 2, ("a b", "")),
        (RestartOptions(spares=1), -1, ("a b c", "d")),
        (RestartOptions(spares=1), 2, ("a b", "c")),
        (RestartOptions(spares=2), 2, ("a b", "c d")),
        (RestartOptions(spares=3), -1, ("a", "b c d")),
        (RestartOptions(max_nodes=3, min_nodes=1), -1, ("a b c", "d")),
    ],
)
def test_hosts_beyond_those_that_take_part_are_spares(
    options: RestartOptions, num_nodes: int, expected: tuple[str, str]
) -> None:
    first = first_attempt(selected("a", "b", "c", "d"), options, num_nodes=num_nodes, run_id="r")
    assert (names(first.hosts), names(first.spares)) == expected


@pytest.mark.parametrize(
    ("options", "num_nodes", "message"),
    [
        (
            RestartOptions(spares=4),
            -1,
            "--spares=4: 4 hosts can take part, and at least 1 of them must run the job; give at most 3",
        ),
        (
            RestartOptions(spares=3),
            2,
            "--spares=3: 4 hosts can take part, and 2 of them must run the job; give at most 2",
        ),
        (RestartOptions(spares=2, max_nodes=3), -1, "--spares=2: 4 hosts can take part, and 3 of them"),
        (RestartOptions(spares=1, max_nodes=9), -1, "--spares=1: 4 hosts can take part, and 9 of them"),
    ],
)
def test_more_spares_than_there_are_hosts_for_are_refused(
    options: RestartOptions, num_nodes: int, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        first_attempt(selected("a", "b", "c", "d"), options, num_nodes=num_nodes, run_id="r")


@pytest.mark.parametrize(
    ("before", "verdict", "options", "expected"),
    [
        # A rank that fails: the same hosts again.
        (attempt("a b"), ended(rank_failed("b")), ON, ("a b", "", "starting again (1 of 3 restarts)")),
        # A host that is lost: a spare in its place, with its ranks.
        (
            attempt("a b c", "s t"),
            ended(host_failed("b")),
            ON,
            ("a s c", "t", "starting again (1 of 3 restarts); s instead of b (lost)"),
        ),
        # A spare that is lost meanwhile is no spare.
        (
            attempt("a b", "s t"),
            ended(host_failed("a"), host_failed("s")),
            ON,
            ("t b", "", "starting again (1 of 3 restarts); t instead of a (lost)"),
        ),
        # Without a spare it may be back; at the start it plainly is not.
        (
            attempt("a b"),
            ended(host_failed("a")),
            ON,
            ("a b", "", "starting again (1 of 3 restarts); with a again (lost), for there is no spare"),
        ),
        (
            attempt("a b"),
            ended(host_failed("a"), ran_s=None),
            ON,
            ("", "", "not started again: 1 of 2 hosts are left and no spare"),
        ),
        # Fewer hosts, where that is allowed.
        (
            attempt("a b c"),
            ended(host_failed("a")),
            RestartOptions(max_restarts=3, min_nodes=2),
            ("b c", "", "starting again (1 of 3 restarts); without a (lost)"),
        ),
        (
            attempt("a b"),
            ended(host_failed("a")),
            RestartOptions(max_restarts=3, min_nodes=2),
            ("", "", "not started again: 1 hosts are left, and --min_nodes is 2"),
        ),
        # A start without some hosts costs no restart.
        (
            attempt("a b", "s"),
            ended(host_failed("b"), ran_s=None),
            RestartOptions(spares=1),
            ("a s", "", "starting with other hosts; s instead of b (lost)"),
        ),
        # Twice in a row on the same host.
        (
            attempt("a b", "s", last_culprit="b", num_restarts=1, number=1),
            ended(rank_failed("b")),
            ON,
            ("a s", "",
             "starting again (2 of 3 restarts); s instead of b (its ranks failed first twice in a row)"),
        ),
        (
            attempt("a b", last_culprit="b", num_restarts=1, number=1),
            ended(rank_failed("b")),
            ON,
            ("a b", "", "starting again (2 of 3 restarts)"),
        ),
        # The ends.
        (attempt("a"), ended(ran_s=9.0), ON, ("", "", "")),
        (attempt("a"), ended(rank_failed("a"), interrupted_by=2), ON, ("", "", "")),
        (attempt("a"), ended(OutputFailure(message="x", at_s=1.0, exit_code=141)), ON, ("", "", "")),
        (attempt("a"), ended(rank_failed("a")), RestartOptions(), ("", "", "")),
        (attempt("a"), ended(host_failed("a", exit_code=2), ran_s=None), ON, ("", "", "")),
        (
            attempt("a", num_restarts=3),
            ended(rank_failed("a")),
            ON,
            ("", "", "not started again: all 3 restarts are used"),
        ),
        (
            attempt("a"),
            ended(rank_failed("a")),
            RestartOptions(spares=1),
            ("", "", "not started again: --max_restarts is 0"),
        ),
        (
            attempt("a b"),
            ended(rank_failed("a"), rank_failed("b"), ran_s=2.34),
            ON,
            ("", "", "not started again: it failed 2.3 s after the start, and --min_uptime is 10 s"),
        ),
    ],
)  # fmt: skip
def test_the_next_attempt(
    before: Attempt, verdict: Verdict, options: RestartOptions, expected: tuple[str, str, str]
) -> None:
    assert shown(decide(before, verdict, options)) == expected


@given(
    num_hosts=st.integers(1, 6),
    num_spares=st.integers(0, 3),
    min_nodes=st.none() | st.integers(1, 6),
    failures=st.lists(
        st.tuples(st.booleans(), st.integers(0, 8), st.none() | st.floats(0, 100)), max_size=12
    ),
)
def test_every_job_comes_to_an_end_and_never_uses_a_host_twice(
    num_hosts: int, num_spares: int, min_nodes: int | None, failures: list[tuple[bool, int, float | None]]
) -> None:
    options = RestartOptions(max_restarts=4, min_nodes=min_nodes, spares=num_spares)
    present: Attempt | None = attempt(
        " ".join(f"h{n}" for n in range(num_hosts)), " ".join(f"s{n}" for n in range(num_spares))
    )
    num_attempts = 0
    for is_host, place, ran_s in failures:
        if present is None:
            break
        num_attempts += 1
        host = present.hosts[place % len(present.hosts)].host.name
        failure = host_failed(host) if is_host else rank_failed(host)
        following = decide(present, ended(failure, ran_s=ran_s), options).attempt
        if following is not None:
            everybody = names(following.hosts).split() + names(following.spares).split()
            assert len(everybody) == len(set(everybody))
            assert len(following.hosts) >= (num_hosts if min_nodes is None else min_nodes)
            assert following.num_restarts <= options.max_restarts
            assert following.number == present.number + 1
        present = following
    assert num_attempts <= 1 + options.max_restarts + num_hosts + num_spares


GIVEN = {
    "max_restarts": None,
    "min_nodes": None,
    "max_nodes": None,
    "spares": 0,
    "min_uptime": 10.0,
    "elastic_training": False,
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RestartOptions()),
        (
            {"elastic_training": True},
            RestartOptions(max_restarts=ELASTIC_RESTARTS, min_nodes=1, is_elastic=True),
        ),
        (
            {"elastic_training": True, "max_restarts": 0, "min_nodes": 3},
            RestartOptions(min_nodes=3, is_elastic=True),
        ),
        ({"min_nodes": -1, "max_nodes": -1}, RestartOptions()),
        ({"min_nodes": 2, "max_nodes": 4}, RestartOptions(min_nodes=2, max_nodes=4)),
    ],
)
def test_the_options(given: dict[str, object], expected: RestartOptions) -> None:
    assert read(RestartOptions, GIVEN | given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"min_nodes": 3, "max_nodes": 2},
            "--min_nodes=3 is more than --max_nodes=2; make the first one smaller",
        ),
    ],
)
def test_options_that_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError) as refused:
        read(RestartOptions, GIVEN | given)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("options", "unfit", "expected"),
    [
        (ON, "b", ("a s c", "t", "starting s instead of b (bad)")),
        (ON, "s", ("a b c", "t", "starting without the spare s (bad)")),
        (ON, "b s", ("a t c", "", "starting t instead of b (bad), without the spare s (bad)")),
        (ON, "b s t", ("", "", "not started: 2 of 3 hosts can be used, and there is no spare")),
        (
            RestartOptions(min_nodes=2),
            "b s t",
            ("a c", "", "starting without b (bad), without the spare s (bad), without the spare t (bad)"),
        ),
        (
            RestartOptions(min_nodes=2),
            "a b s t",
            ("", "", "not started: 1 of 3 hosts can be used, and --min_nodes is 2"),
        ),
    ],
)
def test_hosts_that_a_look_found_unfit_are_left_out_before_the_start(
    options: RestartOptions, unfit: str, expected: tuple[str, str, str]
) -> None:
    before = attempt("a b c", "s t")
    decision = without_unfit(before, dict.fromkeys(unfit.split(), "bad; mend it"), options)
    assert shown(decision) == expected
    assert decision.attempt is None or decision.attempt[3:] == before[3:], "it is no restart"


def hung(host: str) -> Verdict:
    return ended(HangFailure("nothing has moved", 9.0, None if not host else 0, host))


@pytest.mark.parametrize(
    ("spares", "min_nodes", "expected"),
    [("s", None, "a s"), ("", 1, "a"), ("", None, "a b")],
)
def test_a_host_for_whose_ranks_others_waited_twice_in_a_row_is_left_out(
    spares: str, min_nodes: int | None, expected: str
) -> None:
    options = ON._replace(min_nodes=min_nodes)
    first = decide(attempt("a b", spares), hung("b"), options).attempt
    assert first is not None
    assert names(first.hosts) == "a b"
    again = decide(first, hung("b"), options).attempt
    assert again is not None
    assert names(again.hosts) == expected
    for other in (hung("a"), hung("")):  # another one's, or nobody's that is known
        after = decide(first, other, options).attempt
        assert after is not None
        assert names(after.hosts) == "a b"
