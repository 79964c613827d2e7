"""When the port that the others try is open."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from dslaunch.launcher.node.agent.open_port import OpenPort
from dslaunch.launcher.node.system.lean_stdlib import Selector
from dslaunch.launcher.node.system.listener import listen_on_all
from dslaunch.launcher.wire.frames import Frame, Listen, Listening


class Node:
    def __init__(self) -> None:
        self.selector = Selector()
        self.sent: list[Frame] = []
        self.port = OpenPort(self.selector, self.sent.append)

    @property
    def is_open(self) -> bool:
        return len([*self.selector]) == 1


@pytest.fixture
def node() -> Iterator[Node]:
    one = Node()
    yield one
    one.port.close()
    one.selector.close()


@pytest.fixture
def free_port() -> int:
    with contextlib.closing(listen_on_all(0)) as server:
        return int(server.getsockname()[1])


def answers(node: Node) -> list[tuple[int, bool]]:
    """The ports that the launcher was told of, and whether they are open."""
    return [(one.port, not one.problem) for one in node.sent if isinstance(one, Listening)]


def test_a_port_that_is_named_is_open_at_once_and_answers_with_the_token(node: Node, free_port: int) -> None:
    node.port.open(Listen(free_port, "token"), job_port=None)
    assert answers(node) == [(free_port, True)]
    with socket.create_connection(("127.0.0.1", free_port), timeout=20) as connection:
        node.selector.wait(20)
        assert connection.recv(100) == b"token"


def test_the_port_of_the_job_is_opened_when_it_is_chosen(node: Node, free_port: int) -> None:
    node.port.open(Listen(0, "token"), job_port=None)
    assert not node.is_open
    assert node.sent == []
    node.port.choose(free_port)
    assert answers(node) == [(free_port, True)]
    assert node.is_open


def test_the_port_of_the_job_is_opened_at_once_if_it_is_chosen_already(node: Node, free_port: int) -> None:
    node.port.open(Listen(0, "token"), job_port=free_port)
    assert answers(node) == [(free_port, True)]


def test_nothing_is_opened_that_was_not_asked_for(node: Node, free_port: int) -> None:
    node.port.choose(free_port)
    assert not node.is_open
    assert node.sent == []


def test_a_port_that_is_taken_is_a_problem_that_says_why(node: Node) -> None:
    with contextlib.closing(listen_on_all(0)) as server:
        port = int(server.getsockname()[1])
        node.port.open(Listen(port, "token"), job_port=None)
    assert answers(node) == [(port, False)]
    assert not node.is_open


def test_a_closed_port_is_free_for_the_job(node: Node, free_port: int) -> None:
    node.port.open(Listen(free_port, "token"), job_port=None)
    node.port.close()
    node.port.close()
    assert not node.is_open
    listen_on_all(free_port).close()
