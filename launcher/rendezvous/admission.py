"""Admission to a job without SSH: node 0's judgement of a node that wants to join. No I/O."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from .messages import PROTOCOL, JobIdentity, Join

IS_HERE = "is here already"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason why a node does not take part. A mismatch is a mistake of the user who started all of them.

    `is_proven`: the node knows the token, so it is no stranger. `why` is for users at node 0; `told`, the
    text for the node, holds no name or address if the node is not proven.
    """

    why: str
    told: str
    is_mismatch: bool = False
    is_proven: bool = False


def is_proven(join: Join, identity: JobIdentity, *, nonce: str) -> bool:
    """Tell whether this node has shown that it knows the token, or whether there is none to know."""
    return hmac.compare_digest(join.proof.encode(), identity.proof_of(join, nonce).encode())


def refusal_of(
    join: Join, identity: JobIdentity, *, nonce: str, places: Mapping[int, str], is_late: bool
) -> Refusal | None:
    """Return why this node may not take part in node 0's job; None if it may.

    `places` has the places of the nodes that take part already; `is_late`: the job goes on without this one.
    """
    rank = join.node_rank
    stranger = _why_not_the_same_job(join, identity, nonce=nonce)
    if stranger:
        return Refusal(why=stranger, told=stranger)
    is_proven = bool(identity.token)
    if join.hosts_digest != identity.hosts_digest:
        hint = "give all nodes the same hostfile and options"
        theirs = join.hosts or "another one"
        return Refusal(
            why=(why := f"hostfile mismatch: node {rank} has {theirs}; node 0 has {identity.hosts}; {hint}"),
            told=why if is_proven else f"hostfile mismatch: node {rank} has another one than node 0; {hint}",
            is_mismatch=True,
            is_proven=is_proven,
        )
    if join.program_digest != identity.program_digest:
        why = f"program mismatch: node {rank} was started with another script or other arguments than node 0"
        why = f"{why}; give all nodes the same command"
        return Refusal(why=why, told=why, is_mismatch=True, is_proven=is_proven)
    return _why_no_place(rank, identity, places=places, is_late=is_late)


def _why_no_place(
    rank: int, identity: JobIdentity, *, places: Mapping[int, str], is_late: bool
) -> Refusal | None:
    is_proven = bool(identity.token)
    if not 0 <= rank < len(identity.names):
        why = told = f"there is no node {rank}, only 0 to {len(identity.names) - 1}"
    elif rank in places:
        hint = "every node needs its own --node_rank"
        why = f"node {rank} {IS_HERE}, from {places[rank]}; {hint}"
        told = (
            why
            if is_proven
            else f"node {rank} {IS_HERE}; {hint}; the output of node 0 says from where it came"
        )
    elif is_late:
        why = told = "the job is running already; start all nodes again"
    else:
        return None
    return Refusal(why=why, told=told, is_proven=is_proven)


def _why_not_the_same_job(join: Join, identity: JobIdentity, *, nonce: str) -> str:
    if join.protocol != PROTOCOL:
        return (
            f"it speaks protocol {join.protocol}, node 0 speaks {PROTOCOL}; install the "
            "same dslaunch everywhere"
        )
    if not is_proven(join, identity, nonce=nonce):
        return (
            "its DSLAUNCH_TOKEN, or the scheduler's number of its job where that is not set, is not node "
            "0's; give all nodes the same token, or none of them"
        )
    if join.job_id != identity.job_id:
        return f"its --job_id is {join.job_id!r}, and node 0's is another; it belongs to another job"
    return ""
