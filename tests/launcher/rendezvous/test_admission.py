"""Who may take part in a job without SSH. The same over real sockets: test_coordinator.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslaunch.launcher.rendezvous.admission import Refusal, refusal_of
from dslaunch.launcher.rendezvous.messages import PROTOCOL, JobIdentity
from tests.launcher.rendezvous.identity import IDENTITY


def judged(
    theirs: JobIdentity = IDENTITY,
    *,
    mine: JobIdentity = IDENTITY,
    node_rank: int = 1,
    is_late: bool = False,
    **changed: Any,
) -> Refusal | None:
    """What becomes of a node of this identity, while node 0 is there."""
    join = theirs.join(node_rank, nonce="n", heartbeat_s=30.0)._replace(**changed)
    return refusal_of(join, mine, nonce="n", places={0: "here"}, is_late=is_late)


def test_a_node_of_the_same_job_that_is_not_there_yet_takes_part() -> None:
    assert judged() is None
    assert judged(replace(IDENTITY, token="x"), mine=replace(IDENTITY, token="x")) is None


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (judged(protocol=PROTOCOL + 1), "it speaks protocol 5, node 0 speaks 4; install"),
        (judged(replace(IDENTITY, token="x")), "its DSLAUNCH_TOKEN, or the scheduler's number of its job"),
        (
            judged(mine=replace(IDENTITY, token="x")),
            "its DSLAUNCH_TOKEN, or the scheduler's number of its job",
        ),
        (
            judged(replace(IDENTITY, job_id="x")),
            "its --job_id is 'x', and node 0's is another; it belongs to another job",
        ),
        (judged(node_rank=3), "there is no node 3, only 0 to 2"),
        (judged(node_rank=-1), "there is no node -1, only 0 to 2"),
        (judged(node_rank=0), "node 0 is here already, from here; every node needs its own --node_rank"),
        (judged(is_late=True), "the job is running already; start all nodes again"),
    ],
)
def test_others_are_refused_with_the_reason(refusal: Refusal | None, why: str) -> None:
    assert refusal is not None
    assert refusal.why.startswith(why)
    assert not refusal.is_mismatch


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (judged(replace(IDENTITY, hosts_digest="x", hosts="2 hosts")),
         "hostfile mismatch: node 1 has 2 hosts; node 0 has 3 hosts; "),
        (judged(replace(IDENTITY, program_digest="x")),
         "program mismatch: node 1 was started with another script"),
        (judged(replace(IDENTITY, program_digest="x"), is_late=True), "program mismatch: "),
    ],
)  # fmt: skip
def test_nodes_that_were_started_differently_are_a_mismatch(refusal: Refusal | None, why: str) -> None:
    assert refusal is not None
    assert refusal.why.startswith(why)
    assert refusal.is_mismatch
    assert not refusal.is_proven
    assert "3 hosts" not in refusal.told


def test_a_node_that_knows_the_token_is_told_both_sides() -> None:
    mine = replace(IDENTITY, token="x")
    refusal = judged(replace(mine, hosts_digest="x", hosts="2 hosts"), mine=mine)
    assert refusal is not None
    assert refusal.is_proven
    assert refusal.told == refusal.why
    assert "node 1 has 2 hosts; node 0 has 3 hosts" in refusal.told


def test_the_token_is_looked_at_before_what_a_stranger_says_of_the_job() -> None:
    refusal = judged(replace(IDENTITY, hosts_digest="x"), mine=replace(IDENTITY, token="x"))
    assert refusal is not None
    assert not refusal.is_mismatch
