"""The meeting of all nodes, seen from both ends of real sockets: who gets in, who does not,
and how the job ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.output.console import Console
from dslaunch.launcher.rendezvous import connections, coordinator as module
from dslaunch.launcher.rendezvous.coordinator import Coordinator
from dslaunch.launcher.rendezvous.messages import (
    Beat,
    Challenge,
    End,
    Failed,
    Go,
    JobIdentity,
    Join,
    Joined,
    News,
    NewsDecoder,
    NodeEnded,
    NodeReady,
    Proof,
    Refused,
    Welcome,
    both,
    encode_news,
)
from dslaunch.launcher.rendezvous.seal import Seal
from tests.launcher.rendezvous.identity import IDENTITY, PROVEN

pytestmark = pytest.mark.slow

SOON_S = 10.0
RANK_FAILURE = Failed(2, 5, 1, 77, 3, 0, "", 0.0)
T = TypeVar("T", bound=News)
Begin = Callable[..., Coordinator]


class Peer:
    """The other end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = NewsDecoder()
        self._seal: Seal | None = None
        self._news: list[News] = []
        sock.settimeout(SOON_S)

    def send(self, *news: News) -> None:
        self.sock.sendall(b"".join(encode_news(one, self._seal) for one in news))

    def take(self, kind: type[T]) -> T:
        """The next news but beats, which must be of this kind."""
        while True:
            while not self._news:
                data = self.sock.recv(1 << 16)
                assert data, f"the end came instead of {kind.__name__}"
                self._news = self._decoder.feed(data)
            news = self._news.pop(0)
            if not isinstance(news, Beat):
                assert isinstance(news, kind), news
                return news

    def is_closed(self) -> bool:
        """Whether the end comes soon, whatever comes before."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(1 << 16):
                pass
        return True

    def join(self, rank: int, identity: JobIdentity = IDENTITY, **changes: object) -> Peer:
        nonce = both(self.take(Welcome).nonce, "mine")
        self.send(Challenge("mine"))
        assert self.take(Proof).proof == PROVEN.coordinator_proof(nonce) or not identity.token
        join = identity.join(rank, nonce=nonce, heartbeat_s=30.0)
        self.send(join._replace(**changes))  # type: ignore[arg-type]
        seals = identity.seals(nonce)
        if seals is not None:
            self._seal, self._decoder.seal = seals.up, seals.down
        return self

    def refusal(self) -> str:
        message = self.take(Refused).message
        assert self.is_closed()
        return message


class Meeting:
    """A coordinator with a port of its own on this machine."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "said").open("w+b", buffering=0)
        self._sockets: list[socket.socket] = []
        self.coordinator: Coordinator | None = None
        self.port = 0
        self.console = Console(log_level="info", out=self._log, err=self._log)

    def begin(
        self, *, identity: JobIdentity = IDENTITY, heartbeat_s: float = 30.0, timeout_s: float = 30.0
    ) -> Meeting:
        self.coordinator = Coordinator(
            identity, console=self.console, heartbeat_s=heartbeat_s, kill_grace_s=0.0, timeout_s=timeout_s
        )
        self.port = self.coordinator.listen(0)
        self.coordinator.start()
        return self

    def connect(self) -> Peer:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)
        self._sockets.append(sock)
        return Peer(sock)

    def members(self, *ranks: int, identity: JobIdentity = IDENTITY) -> list[Peer]:
        """These nodes, all joined and ready."""
        peers = [self.connect().join(rank, identity) for rank in ranks]
        for peer in peers:
            peer.take(Joined)
            peer.send(NodeReady())
        return peers

    def running(self) -> list[Peer]:
        peers = self.members(0, 1, 2)
        for peer in peers:
            peer.take(Go)
        return peers

    @property
    def said(self) -> str:
        self.console.drain(SOON_S)
        return Path(self._log.name).read_text()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        if self.coordinator is not None:
            self.coordinator._state = module.CoordinatorState.ENDED  # if the test left it in the middle
            self.coordinator.join(SOON_S)
        self.console.drain(SOON_S)
        self._log.close()


def poll(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    made.close()


def assert_job_unharmed(meeting: Meeting, members: list[Peer]) -> None:
    """All nodes that are not there yet can come, and the job begins and ends well."""
    members += meeting.members(*range(len(members), 3))
    for peer in members:
        peer.take(Go)
    for peer in members:
        peer.send(NodeEnded())
    for peer in members:
        peer.take(End)
        assert peer.is_closed()


def test_nobody_starts_before_all_are_ready_and_nobody_ends_before_all_ended(meeting: Meeting) -> None:
    first, second = meeting.begin().members(2, 0)
    third = meeting.connect().join(1)
    third.take(Joined)
    third.send(Beat())
    first.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        first.take(Go)
    third.send(NodeReady())
    first.sock.settimeout(SOON_S)
    for peer in (first, second, third):
        peer.take(Go)
    first.send(NodeEnded())
    second.send(NodeEnded())
    first.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        first.take(End)
    third.send(NodeEnded())
    first.sock.settimeout(SOON_S)
    for peer in (first, second, third):
        peer.take(End)


def test_the_first_failure_is_told_to_all_and_is_the_last_word_too(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    peers[2].send(RANK_FAILURE)
    for peer in peers:
        assert peer.take(Failed)[:7] == RANK_FAILURE[:7]
        peer.send(NodeEnded())
    for peer in peers:
        assert peer.take(Failed)[:7] == RANK_FAILURE[:7]
        peer.take(End)


def test_a_failure_that_came_later_but_happened_before_is_the_culprit(meeting: Meeting) -> None:
    """The message of the node that failed first was the slower one."""
    peers = meeting.begin().running()
    peers[1].send(Failed(1, 2, 0, 66, 1, 0, "", 0.1))
    for peer in peers:
        assert peer.take(Failed).rank == 2
    peers[2].send(RANK_FAILURE._replace(age_s=5.0))
    for peer in peers:
        peer.send(NodeEnded())
    for peer in peers:
        assert peer.take(Failed).rank == 5
        peer.take(End)


def test_a_node_speaks_for_itself_only(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    peers[1].send(Failed(0, -1, -1, 0, 9999, 0, "not me", -5.0))
    told = peers[0].take(Failed)
    assert (told.node_rank, told.code) == (1, 1)


def test_a_node_that_vanishes_is_a_lost_host(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    peers[1].sock.close()
    told = peers[0].take(Failed)
    assert (told.node_rank, told.rank, told.code) == (1, -1, 3)
    for peer in (peers[0], peers[2]):
        peer.send(NodeEnded())
    peers[0].take(Failed)
    peers[0].take(End)


def test_a_silent_node_is_lost_after_the_heartbeat(meeting: Meeting) -> None:
    peers = meeting.begin(heartbeat_s=1.0).running()
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        for peer in (peers[0], peers[2]):
            peer.send(Beat())
        time.sleep(0.05)
    told = peers[0].take(Failed)
    assert told.node_rank == 1
    assert told.message.startswith("nothing heard for 1 s")


def test_half_a_frame_now_and_then_is_no_sign_of_life(meeting: Meeting) -> None:
    peers = meeting.begin(heartbeat_s=1.0).running()
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        peers[0].send(Beat())
        peers[2].send(Beat())
        with contextlib.suppress(OSError):
            peers[1].sock.send(b"\0")
        time.sleep(0.05)
    assert peers[0].take(Failed).node_rank == 1


def test_a_node_may_leave_before_the_start_and_come_again(meeting: Meeting) -> None:
    first = meeting.begin().members(0)
    gone = meeting.members(1)[0]
    gone.sock.close()
    poll(lambda: "node 1 (b) left before the start" in meeting.said)
    assert_job_unharmed(meeting, first)


def test_those_who_do_not_come_are_named(meeting: Meeting) -> None:
    (only,) = meeting.begin(timeout_s=0.5).members(1)
    told = only.take(Failed)
    assert told.code == 3
    assert told.node_rank == 0
    assert told.message.startswith(
        "it did not come within 0.5 s, nor node 2 (c); start the same command there"
    )
    only.send(NodeEnded())
    only.take(Failed)
    only.take(End)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": 5}, "it speaks protocol 5, node 0 speaks 4"),
        ({"job_id": "other"}, "its --job_id is 'other', and node 0's is another"),
        (
            {"proof": "00"},
            "its DSLAUNCH_TOKEN, or the scheduler's number of its job where that is not set, is not ",
        ),
        ({"node_rank": 3}, "there is no node 3, only 0 to 2"),
        ({"node_rank": -1}, "there is no node -1, only 0 to 2"),
        ({"node_rank": 0}, "node 0 is here already"),
    ],
)
def test_who_does_not_belong_is_refused_and_the_job_goes_on(
    meeting: Meeting, changes: dict[str, object], message: str
) -> None:
    members = meeting.begin().members(0)
    assert message in meeting.connect().join(1, **changes).refusal()
    assert_job_unharmed(meeting, members)
    assert message in meeting.said


def test_with_a_token_only_those_who_know_it_get_in(meeting: Meeting) -> None:
    meeting.begin(identity=PROVEN)
    assert "DSLAUNCH_TOKEN" in meeting.connect().join(0).refusal()
    member = meeting.connect().join(0, PROVEN)
    member.take(Joined)


@pytest.mark.parametrize("is_again", [False, True])
def test_what_another_program_puts_into_a_connection_is_blamed_on_no_rank(
    is_again: bool, meeting: Meeting
) -> None:
    """A failure that is made up, or a frame a second time: the connection ends, and that is what is said."""
    meeting.begin(identity=PROVEN)
    members = meeting.members(0, 1, 2, identity=PROVEN)
    for one in members:
        one.take(Go)
    seal = members[2]._seal
    assert seal is not None
    frame = encode_news(Beat(), seal) if is_again else b""
    members[2].sock.sendall(frame)
    members[2].sock.sendall(frame or encode_news(RANK_FAILURE))
    told = members[0].take(Failed)
    assert (told.node_rank, told.rank) == (2, -1)
    assert "a frame that the other side did not send, or not now; who is on the way?" in told.message


def test_a_node_tells_of_its_own_ranks_only(meeting: Meeting) -> None:
    meeting.begin()
    members = meeting.running()
    members[1].send(RANK_FAILURE)  # of node 2
    told = members[0].take(Failed)
    assert (told.node_rank, told.rank) == (1, -1)
    assert "a failure of rank 5, which does not run there" in told.message


def test_an_answer_of_one_side_does_not_serve_the_other_or_another_connection(meeting: Meeting) -> None:
    meeting.begin(identity=PROVEN)
    peer = meeting.connect()
    nonce = both(peer.take(Welcome).nonce, "mine")
    peer.send(Challenge("mine"))
    theirs = peer.take(Proof).proof
    join = PROVEN.join(1, nonce=nonce, heartbeat_s=30.0)
    assert theirs != join.proof
    peer.send(join._replace(proof=theirs))
    assert "DSLAUNCH_TOKEN" in peer.refusal()
    other = meeting.connect()
    other.take(Welcome)
    other.send(Challenge("mine"))
    other.take(Proof)
    other.send(join)
    assert "DSLAUNCH_TOKEN" in other.refusal()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts_digest": "other", "hosts": "2 hosts"},
         "hostfile mismatch: node 1 has 2 hosts; node 0 has 3 hosts"),
        ({"program_digest": "other"}, "program mismatch: node 1 was started with another script"),
    ],
)  # fmt: skip
def test_a_mismatch_of_a_node_that_knows_the_token_ends_all_with_2(
    meeting: Meeting, changes: dict[str, object], message: str
) -> None:
    (member,) = meeting.begin(identity=PROVEN).members(0, identity=PROVEN)
    theirs = replace(PROVEN, **changes)  # type: ignore[arg-type]
    refused = meeting.connect().join(1, theirs).take(Refused)
    assert message in refused.message
    assert refused.exit_code == 2
    told = member.take(Failed)
    assert message in told.message
    assert (told.node_rank, told.code) == (1, 2)
    late = meeting.connect().join(2, PROVEN)
    late.take(Joined)
    assert late.take(Failed).code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts_digest": "other", "hosts": ""}, "hostfile mismatch: node 1 has another one"),
        ({"program_digest": "other"}, "program mismatch: node 1 was started with another script"),
        ({"node_rank": 0}, "node 0 is here already; every node"),
    ],
)
def test_a_stranger_without_a_token_is_refused_and_forgotten_and_told_no_names(
    meeting: Meeting, changes: dict[str, object], message: str
) -> None:
    members = meeting.begin().members(0)
    refusal = meeting.connect().join(1, **changes).refusal()
    assert message in refusal
    assert "3 hosts" not in refusal
    assert "127.0.0.1" not in refusal
    poll(lambda: "was refused" in meeting.said)
    assert_job_unharmed(meeting, members)


def test_node_0_s_own_part_hears_of_a_mismatch_that_came_before_it_had_joined(meeting: Meeting) -> None:
    coordinator = meeting.coordinator = Coordinator(
        PROVEN, console=meeting.console, heartbeat_s=30.0, kill_grace_s=0.0, timeout_s=30.0
    )
    meeting.port = coordinator.listen(0)
    ours, theirs = socket.socketpair()
    coordinator.adopt(theirs)
    coordinator.start()
    with ours:
        meeting.connect().join(1, replace(PROVEN, program_digest="other")).refusal()
        poll(lambda: coordinator.failures.stopped_at is not None)
        own = Peer(ours).join(0, PROVEN)
        own.take(Joined)
        assert own.take(Failed).code == 2
        own.send(NodeEnded())
        own.take(Failed)
        own.take(End)


def test_a_mismatch_does_not_end_a_job_that_runs(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    meeting.connect().join(1, hosts_digest="other").refusal()
    for peer in (peers[0], peers[2]):
        peer.send(NodeEnded())
    peers[0].sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peers[0].take(End)
    peers[0].sock.settimeout(SOON_S)
    peers[1].send(NodeEnded())
    for peer in peers:
        peer.take(End)


def test_a_node_that_comes_too_late_is_told_so(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    assert "node 1 is here already" in meeting.connect().join(1).refusal()
    peers[1].sock.close()
    peers[0].take(Failed)
    assert "the job is running already" in meeting.connect().join(1).refusal()


# Strangers.


def test_a_node_0_that_comes_while_the_job_ends_is_not_told_that_there_is_one(meeting: Meeting) -> None:
    peers = meeting.begin().running()
    peers[2].send(RANK_FAILURE)
    peers[1].take(Failed)
    late = meeting.connect().join(0)
    assert late.is_closed()
    assert "called itself node 0" not in meeting.said


def test_half_open_connections_are_closed_after_the_handshake_time(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    members = meeting.begin().members(0)
    silent, slow = meeting.connect(), meeting.connect()
    slow.sock.sendall(struct.pack(">I", 1000))
    assert silent.is_closed()
    assert slow.is_closed()
    assert_job_unharmed(meeting, members)


def test_a_huge_length_closes_the_connection_at_once(meeting: Meeting) -> None:
    members = meeting.begin().members(0)
    peer = meeting.connect()
    peer.sock.sendall(b"\xff\xff\xff\xff")
    assert peer.is_closed()
    assert_job_unharmed(meeting, members)


def test_a_flood_of_connections_keeps_nobody_out(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 8)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 600.0)
    members = meeting.begin().members(0)
    strangers = [meeting.connect() for _ in range(100)]
    members += meeting.members(1)
    assert strangers[0].is_closed(), "the oldest goes first"
    assert_job_unharmed(meeting, members)


def test_many_complaints_are_not_shown(meeting: Meeting) -> None:
    members = meeting.begin().members(0)
    for _ in range(20):
        meeting.connect().join(1, proof="guess").refusal()
    assert_job_unharmed(meeting, members)
    assert meeting.said.count("was refused") == module.MAX_COMPLAINTS
    assert "more of that is not shown" in meeting.said


def test_who_does_not_read_is_dropped(meeting: Meeting) -> None:
    """Without the thread: everything happens here, one step after the other."""
    coordinator = Coordinator(
        IDENTITY, console=meeting.console, heartbeat_s=30.0, kill_grace_s=0.0, timeout_s=30.0
    )
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(coordinator._connections):
        coordinator.adopt(theirs)
        peer = Peer(ours)
        nonce = both(peer.take(Welcome).nonce, "mine")
        peer.send(Challenge("mine"), IDENTITY.join(1, nonce=nonce, heartbeat_s=30.0))
        coordinator._connections.serve(SOON_S)
        peer.take(Proof)
        peer.take(Joined)
        member = coordinator._members[1]
        message = Failed(2, -1, -1, 0, 1, 0, "x" * 400, 0.0)
        for _ in range(100_000):
            coordinator._connections.send(member, message)
            if member not in coordinator._connections.peers:
                break
        assert len(member.outbox) < connections.MAX_OUTBOX_BYTES + 1000
        assert 1 not in coordinator._members


@given(chunks=st.lists(st.binary(min_size=1, max_size=200), max_size=5))
@settings(max_examples=60)
def test_garbage_never_harms_the_job(fuzzed: Meeting, chunks: list[bytes]) -> None:
    stranger = fuzzed.connect()
    with contextlib.suppress(OSError):
        for chunk in chunks:
            stranger.sock.sendall(chunk)
        stranger.sock.shutdown(socket.SHUT_WR)
    assert stranger.is_closed()
    assert fuzzed.connect().take(Welcome).protocol == 4


frames = st.sampled_from(
    [
        Go(),
        End(),
        NodeReady(),
        NodeEnded(),
        Beat(),
        Joined(1.0),
        Welcome(1, "x"),
        Refused("x", 2),
        Challenge("x"),
    ]
)
joins = st.builds(
    Join,
    st.integers(0, 2), st.sampled_from(["", "x"]), st.integers(-2, 4), st.just("h"), st.just("h"),
    st.just("p"), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["", "x"]),
)  # fmt: skip
failures = st.builds(Failed, *[st.integers(-5, 300)] * 6, st.text(max_size=9), st.floats(-9, 9))


@given(
    scripts=st.lists(st.lists(frames | joins | failures, max_size=6), min_size=1, max_size=4),
    are_closed=st.booleans(),
)
@settings(max_examples=12)
def test_frames_in_any_order_end_in_a_verdict(
    tmp_path: Path, scripts: list[list[News]], are_closed: bool
) -> None:
    """Members may say anything: the coordinator neither dies nor hangs."""
    meeting = Meeting(tmp_path)
    try:
        meeting.begin(heartbeat_s=0.3, timeout_s=0.2)
        assert meeting.coordinator is not None
        for script in scripts:
            with contextlib.suppress(OSError):  # one that comes after the verdict is refused
                peer = meeting.connect()
                peer.send(*script)
                if are_closed:
                    peer.sock.close()
        meeting.coordinator.join(SOON_S + module.STOP_MARGIN_S)
        assert not meeting.coordinator._thread.is_alive()
    finally:
        meeting.close()


@pytest.fixture
def fuzzed(meeting: Meeting) -> Iterator[Meeting]:
    """One meeting for all examples; at the end the job is as well as before."""
    members = meeting.begin().members(0)
    yield meeting
    assert_job_unharmed(meeting, members)
