"""Who may take part in a job without SSH: node 0's judgement of a node that wants to join. No I/O."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from .news import PROTOCOL, Identity, Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a node does not take part. A mismatch is a mistake of the person who started all of them."""

    why: str
    is_mismatch: bool = False


def refusal_of(
    join: Join, identity: Identity, *, nonce: str, places: Mapping[int, str], is_late: bool
) -> Refusal | None:
    """Why this node may not take part in node 0's job; None if it may.

    `places` says where the nodes are that take part already; `is_late`, that the job goes on without this one.
    """
    rank = join.node_rank
    why = _why_not_the_same_job(join, identity, nonce=nonce)
    if why:
        return Refusal(why=why)
    if join.hosts_digest != identity.hosts_digest:
        why = f"hostfile mismatch: node {rank} has {join.hosts}; node 0 has {identity.hosts}"
        return Refusal(why=f"{why}; give all nodes the same hostfile and options", is_mismatch=True)
    if join.program_digest != identity.program_digest:
        why = f"program mismatch: node {rank} was started with another script or other arguments than node 0"
        return Refusal(why=f"{why}; give all nodes the same command", is_mismatch=True)
    if not 0 <= rank < len(identity.names):
        return Refusal(why=f"there is no node {rank}, only 0 to {len(identity.names) - 1}")
    if rank in places:
        why = f"node {rank} is here already, from {places[rank]}; every node needs its own --node_rank"
        return Refusal(why=why)
    return Refusal(why="the job is running already; start all nodes again") if is_late else None


def _why_not_the_same_job(join: Join, identity: Identity, *, nonce: str) -> str:
    if join.protocol != PROTOCOL:
        return f"it speaks protocol {join.protocol}, node 0 speaks {PROTOCOL}; install the same dslaunch everywhere"
    if not hmac.compare_digest(join.proof.encode(), identity.proof_of(join, nonce).encode()):
        return "its DSLAUNCH_TOKEN is not node 0's; give all nodes the same one, or none of them"
    if join.job_id != identity.job_id:
        return f"its --job_id is {join.job_id!r}, node 0's is {identity.job_id!r}; it belongs to another job"
    return ""
