"""A node's connection to the coordinator, over a real socket whose other end is in the test's hands."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dslaunch.launcher.rendezvous.message_stream import NewsLine
from dslaunch.launcher.rendezvous.messages import Beat, Go, Joined, NewsDecoder, NodeReady, encode_news
from dslaunch.launcher.rendezvous.seal import Seal
from dslaunch.launcher.wire.frames import ProtocolError

SOON_S = 10.0
Pair = tuple[NewsLine, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A line, and the coordinator's end of it."""
    line = NewsLine()
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON_S)
    line.adopt(ours)
    yield line, theirs
    line.close()
    theirs.close()


def test_news_go_both_ways_in_order(pair: Pair) -> None:
    line, theirs = pair
    line.send(NodeReady())
    line.send(Beat())
    decoder, found = NewsDecoder(), []
    while len(found) < 2:
        found += decoder.feed(theirs.recv(1000))
    assert found == [NodeReady(), Beat()]
    theirs.sendall(encode_news(Joined(1.0)) + encode_news(Go()) + encode_news(Beat()))
    assert line.next(SOON_S) == Joined(1.0)
    assert line.take() == [Go(), Beat()], "what came together with an answer is not lost"


def test_news_in_pieces_count_as_heard_when_they_are_whole(pair: Pair) -> None:
    line, theirs = pair
    before = line.heard_at
    data = encode_news(Go())
    theirs.sendall(data[:5])
    assert line.take() == []
    assert line.heard_at == before
    theirs.sendall(data[5:])
    assert line.take() == [Go()]
    assert line.heard_at > before


def test_the_other_side_s_end_is_an_error(pair: Pair) -> None:
    line, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionResetError, match="closed by the other side"):
        line.take()


def test_what_came_before_a_seal_was_agreed_needs_it_too(pair: Pair) -> None:
    line, theirs = pair
    theirs.sendall(encode_news(Joined(1.0)) + encode_news(Go()))
    assert line.next(SOON_S) == Joined(1.0)
    line.seal(sent=Seal(b"up"), received=Seal(b"down"))
    with pytest.raises(ProtocolError, match="did not send, or not now"):
        line.take()


def test_something_else_than_news_is_an_error(pair: Pair) -> None:
    line, theirs = pair
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProtocolError):
        line.next(SOON_S)


def test_an_answer_that_does_not_come_is_an_error(pair: Pair) -> None:
    line, _ = pair
    with pytest.raises(ProtocolError, match="it does not answer as a coordinator does"):
        line.next(0.01)


def test_a_bell_ends_a_wait(pair: Pair) -> None:
    line, _ = pair
    began = time.monotonic()
    line.wake()
    line.sleep(SOON_S)
    threading.Timer(0.01, line.wake).start()
    line.sleep(SOON_S)
    assert time.monotonic() - began < SOON_S


def test_another_connection_begins_anew(pair: Pair) -> None:
    line, theirs = pair
    theirs.sendall(encode_news(Go())[:5])
    assert line.take() == []
    line.hang_up()
    with socket.create_server(("127.0.0.1", 0)) as server:
        line.connect("127.0.0.1", server.getsockname()[1])
        second, _ = server.accept()
        with second:
            second.sendall(encode_news(Beat()))
            assert line.next(SOON_S) == Beat(), "nothing is left of the first one"


def test_without_a_connection_nothing_can_be_said(pair: Pair) -> None:
    line, _ = pair
    line.hang_up()
    with pytest.raises(AssertionError, match="before there is a connection"):
        line.send(Beat())
