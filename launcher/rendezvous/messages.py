"""The messages between nodes of a job without SSH: status only, as length-prefixed JSON frames like those of
frames.py.

Nothing that comes in this way is ever run, and no argument, variable or output of a worker goes out. A
program that can reach the port may send anything, so a frame is short, each field has the type and size that
is declared here, and unprintable signs of a text are dropped before it is shown.

[Note: Proof both ways]
Where the nodes share a token, each side shows that it knows it before it sends a fact about the job: the
coordinator sends a nonce (Welcome), the member sends its own (Challenge), the coordinator answers with an
HMAC over both (Proof), and only then does the member send the names of its hosts, with an HMAC of its own
(Join). The two are made with different words, so that neither side's answer can be sent back as the other's.
Each frame after these has a code of its own: seal.py. Only a refusal of a node that has shown no knowledge of
the token has none.
Without a token no side is proven: names are told to neither side, and frames of such a member end nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..job.mesh import JobMesh
from ..job.plan import Plan
from ..job.verdict import Failure, HostFailure, RankFailure
from ..wire.frames import FITS, body_of, cut, table_of, unpack, with_length
from ..wording import cleaned
from .seal import Seal

if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from ..wire.fast_tuple import Record as NamedTuple

PROTOCOL = 4
MAX_FRAME_BYTES = 64 << 10
MAX_NUMBER = 1 << 53
MAX_TEXT = 500  # characters that are kept
_HOSTS_SHOWN = 8


# Coordinator to member.


class Welcome(NamedTuple):
    """The first frame of a connection. `nonce` is the coordinator's: see [Note: Proof both ways]."""

    protocol: int
    nonce: str


class Proof(NamedTuple):
    """Proof that the coordinator knows the token; empty if it has none."""

    proof: str


class Refused(NamedTuple):
    """This connection does not take part, for good."""

    message: str
    exit_code: int


class Joined(NamedTuple):
    """The node takes part. A silence of `heartbeat_s` seconds means that it is lost."""

    heartbeat_s: float


class Go(NamedTuple):
    """All nodes are ready: start."""


class End(NamedTuple):
    """All parts ended: as the last Failed says, or well if there was none."""


# Member to coordinator.


class Challenge(NamedTuple):
    """The member's nonce."""

    nonce: str


class Join(NamedTuple):
    """Identity of the node, and its start options.

    `hosts` is for users, and empty to a coordinator that has proven nothing; the digests count.
    """

    protocol: int
    job_id: str
    node_rank: int
    hosts: str
    hosts_digest: str
    program_digest: str
    heartbeat_s: float
    proof: str


class NodeReady(NamedTuple):
    """This node's part can start."""


class NodeEnded(NamedTuple):
    """No process of this node's part is left."""


# Both ways.


class Failed(NamedTuple):
    """A failure, `age_s` seconds ago: a rank's, or the node's own if `rank` is -1.

    Down: the failure of the job.
    """

    node_rank: int
    rank: int
    local_rank: int
    pid: int
    code: int
    signal: int
    message: str
    age_s: float


class Beat(NamedTuple):
    """The sender lives."""


News = (
    Welcome | Proof | Challenge | Refused | Joined | Go | End | Join | NodeReady | NodeEnded | Failed | Beat
)
_NEWS = table_of(__name__, {**FITS, "int": lambda value: type(value) is int and abs(value) <= MAX_NUMBER})


class NewsDecoder:
    """Cuts a byte stream into news; like frames.Decoder, for a peer that is not trusted."""

    def __init__(self) -> None:
        self.seal: Seal | None = None  # counts for each frame that is taken from then on
        self._pending = bytearray()
        self._bodies: deque[bytes] = deque()

    def add(self, data: bytes) -> bool:
        """Take in bytes; tell whether there is news. Errors: ProtocolError as `feed`"""
        self._pending += data
        self._bodies += cut(self._pending, max_bytes=MAX_FRAME_BYTES)
        return bool(self._bodies)

    def news(self) -> Iterator[News]:
        """Yield the news, each one checked when it is asked for. Errors: ProtocolError as `feed`"""
        while self._bodies:
            body = self._bodies.popleft()
            yield _printable(unpack(body if self.seal is None else self.seal.open(body), _NEWS))

    def feed(self, data: bytes) -> list[News]:
        """Do both. Errors: ProtocolError if the stream is anything but this protocol."""
        self.add(data)
        return [*self.news()]


def encode_news(news: News, seal: Seal | None = None) -> bytes:
    body = body_of(news)
    return with_length(body if seal is None else seal.close(body))


def _printable(news: News) -> News:
    values = zip(news._fields, news, strict=True)
    texts: dict[str, Any] = {name: printable(one) for name, one in values if isinstance(one, str)}
    return news._replace(**texts)


def printable(text: str) -> str:
    """Return text of a stranger without signs that harm a terminal."""
    return cleaned(text, MAX_TEXT)


class Seals(NamedTuple):
    """Codes for the coordinator's frames, and for the member's."""

    down: Seal
    up: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """The identity of a job, the same on all its nodes, which tells it from other jobs."""

    job_id: str
    token: str
    names: tuple[str, ...]  # names of the hosts, by node rank
    ranks: tuple[tuple[int, ...], ...]  # ranks that run there, by node rank and local rank
    hosts: str  # the hosts, as messages show them
    hosts_digest: str
    program_digest: str
    mesh: JobMesh | None = None

    def join(self, node_rank: int, *, nonce: str, heartbeat_s: float, shows_hosts: bool = True) -> Join:
        """Return a member's request to take part. `nonce` is the one that `both` made of the two."""
        join = Join(
            PROTOCOL,
            self.job_id,
            node_rank,
            printable(self.hosts) if shows_hosts else "",
            self.hosts_digest,
            self.program_digest,
            heartbeat_s,
            "",
        )
        return join._replace(proof=self.proof_of(join, nonce))

    def proof_of(self, join: Join, nonce: str) -> str:
        """Return a proof that the member of this request knows the token, without showing it; empty without a
        token.
        """
        return self._hmac("member", nonce, *join[:-1])

    def coordinator_proof(self, nonce: str) -> str:
        """Return the same for the coordinator."""
        return self._hmac("coordinator", nonce)

    def seals(self, nonce: str) -> Seals | None:
        """Return the codes of a connection with these two nonces; None without a token."""
        if not self.token:
            return None
        down, up = (Seal(bytes.fromhex(self._hmac(words, nonce))) for words in ("news down", "news up"))
        return Seals(down, up)

    def has(self, failed: Failed) -> bool:
        """Tell whether a failure is one of the node that reports it: its own, or of one of its ranks."""
        ranks = self.ranks[failed.node_rank]
        is_local = 0 <= failed.local_rank < len(ranks) and ranks[failed.local_rank] == failed.rank
        return failed.rank == -1 or is_local

    def _hmac(self, *said: str | float) -> str:
        if not self.token:
            return ""
        return hmac.new(os.fsencode(self.token), json.dumps(said).encode(), hashlib.sha256).hexdigest()

    def name_of(self, node_rank: int) -> str:
        is_known = 0 <= node_rank < len(self.names)
        return f"node {node_rank} ({self.names[node_rank]})" if is_known else f"node {node_rank}"


def both(coordinators: str, members: str) -> str:
    """Join the two nonces of a connection."""
    return json.dumps([coordinators, members])


def identify(plan: Plan, *, job_id: str, token: str) -> JobIdentity:
    """Return the identity of the whole job, the same on every node that was started with the same command and
    hostfile.
    """
    hosts = [f"{node.host.name}:{','.join(node.devices)}" for node in plan.nodes]
    shown = " ".join(hosts[:_HOSTS_SHOWN]) + (" ..." if len(hosts) > _HOSTS_SHOWN else "")
    program = plan.program
    parts = [program.head, program.arguments, program.python is None, program.takes_local_rank]
    return JobIdentity(
        job_id=printable(job_id),
        token=token,
        names=tuple(node.host.name for node in plan.nodes),
        ranks=tuple(tuple(one.rank for one in node.ranks) for node in plan.nodes),
        hosts=f"{len(hosts)} hosts, {plan.world_size} ranks: {shown}",
        hosts_digest=_digest(hosts),
        program_digest=_digest(parts),
        mesh=plan.mesh,
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def news_of(failure: Failure, *, node_rank: int, now: float) -> Failed:
    """Return a failure as the other nodes hear of it: who, where and how, without output of a worker."""
    age_s = max(0.0, now - failure.at_s)
    if isinstance(failure, RankFailure):
        ranks = (failure.rank, failure.local_rank, failure.pid)
        return Failed(node_rank, *ranks, failure.code, failure.signal, "", age_s)
    return Failed(node_rank, -1, -1, 0, failure.exit_code, 0, printable(failure.message), age_s)


def failure_of(failed: Failed, identity: JobIdentity, *, now: float) -> Failure:
    """Return the failure that another node reported, on our clock."""
    at_s = now - failed.age_s
    if failed.rank < 0:
        host = identity.name_of(failed.node_rank)
        return HostFailure(host=host, message=failed.message, at_s=at_s, exit_code=failed.code)
    return RankFailure(
        rank=failed.rank,
        local_rank=failed.local_rank,
        host=identity.names[failed.node_rank],
        pid=failed.pid,
        code=failed.code,
        signal=failed.signal,
        at_s=at_s,
        place="" if identity.mesh is None else identity.mesh.place(failed.rank),
        last_lines=(),
    )
