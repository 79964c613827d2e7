"""The request of a node to a coordinator to take part. See messages.py, [Note: Proof both ways]."""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Callable

from ..errors import EXIT_HOST
from ..wire.frames import ProtocolError
from .message_stream import NewsLine
from .messages import PROTOCOL, Challenge, JobIdentity, Joined, Proof, Refused, Welcome, both

HANDSHAKE_S = 5.0


class TurnedAway(Exception):
    """A coordinator does not take this node.

    `is_proven`: it is the coordinator of our job, as far as the token tells.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_HOST, is_proven: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_proven = is_proven


def ask_to_join(
    line: NewsLine,
    identity: JobIdentity,
    node_rank: int,
    *,
    heartbeat_s: float,
    is_ours: Callable[[str], bool] = lambda nonce: False,
) -> Joined | None:
    """Return the coordinator's answer over a connection that has just been made; None if the nonce is one of
    `is_ours`.

    Errors: TurnedAway; ProtocolError if the other side is no coordinator of our job; OSError
    """
    welcome = line.next(HANDSHAKE_S)
    if not isinstance(welcome, Welcome):
        raise ProtocolError("it is not a coordinator")
    if is_ours(welcome.nonce):
        return None
    if welcome.protocol != PROTOCOL:
        # Answer, so that node 0 can say why it waits for us.
        with contextlib.suppress(OSError, ProtocolError, TurnedAway):
            _answer_to(welcome, line, identity, node_rank, heartbeat_s)
        raise TurnedAway(
            f"node 0 speaks protocol {welcome.protocol}, this node {PROTOCOL}; install the "
            "same dslaunch everywhere"
        )
    return _answer_to(welcome, line, identity, node_rank, heartbeat_s)


def _answer_to(
    welcome: Welcome, line: NewsLine, identity: JobIdentity, node_rank: int, heartbeat_s: float
) -> Joined:
    nonce, is_proven = _challenge(line, identity, welcome)
    shows_hosts = is_proven and bool(identity.token)
    line.send(identity.join(node_rank, nonce=nonce, heartbeat_s=heartbeat_s, shows_hosts=shows_hosts))
    seals = identity.seals(nonce) if is_proven and welcome.protocol == PROTOCOL else None
    if seals is not None:
        line.seal(sent=seals.up, received=seals.down)
    answer = line.next(HANDSHAKE_S)
    if isinstance(answer, Refused):
        is_about_hosts = answer.message.startswith("hostfile") and not shows_hosts
        ours = f" (this node has {identity.hosts})" if is_about_hosts else ""
        raise TurnedAway(f"{answer.message}{ours}", exit_code=answer.exit_code, is_proven=is_proven)
    if not isinstance(answer, Joined):
        raise ProtocolError("it is not a coordinator")
    if not is_proven:
        raise ProtocolError("it does not know this job's token, so it is not node 0")
    return answer


def _challenge(line: NewsLine, identity: JobIdentity, welcome: Welcome) -> tuple[str, bool]:
    """Ask the other side for its proof; return both nonces as one, and whether it is the coordinator of our
    job.
    """
    ours = secrets.token_hex(16)
    line.send(Challenge(ours))
    answer = line.next(HANDSHAKE_S)
    if not isinstance(answer, Proof):
        raise ProtocolError("it is not a coordinator")
    nonce = both(welcome.nonce, ours)
    if not identity.token:
        return nonce, True
    return nonce, hmac.compare_digest(answer.proof.encode(), identity.coordinator_proof(nonce).encode())
