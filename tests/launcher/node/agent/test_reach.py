from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import select
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from dslaunch.launcher.node.agent.reach import try_addresses
from dslaunch.launcher.node.system.listener import PortListener, listen_on_all, why_not_listening
from dslaunch.launcher.node.system.own_addresses import own_addresses

TIMEOUT_S = 5.0
TOKEN = "0123456789abcdef"


def free_port() -> int:
    server = listen_on_all(0)
    number: int = server.getsockname()[1]
    server.close()
    return number


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a listener that answers in a thread."""
    number = free_port()
    listener = PortListener(number, TOKEN)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(0.001):
            listener.accept()

    thread = threading.Thread(target=serve)
    thread.start()
    yield number
    is_over.set()
    thread.join()
    listener.close()
    assert_free(number)


def assert_free(port: int) -> None:
    """Nothing is left on the port, not even a connection on its way out,
    which SO_REUSEADDR would pass over.
    """
    with socket.socket() as server:
        server.bind(("", port))


def test_the_host_that_is_meant_answers_on_all_its_addresses(port: int) -> None:
    addresses = ["127.0.0.1", "localhost", *own_addresses()]
    assert try_addresses(addresses, port, TOKEN, TIMEOUT_S) == [""] * len(addresses)


def test_who_has_another_token_is_somebody_else(port: int) -> None:
    assert try_addresses(["127.0.0.1"], port, TOKEN[::-1], TIMEOUT_S) == ["is another host or program"]


def test_who_stays_connected_is_not_in_the_way_of_who_takes_the_port_next() -> None:
    port = free_port()
    listener = PortListener(port, TOKEN)
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as stranger:
        while select.select([listener], [], [], 0)[0]:
            listener.accept()
        assert stranger.recv(99) == TOKEN.encode()
        listener.close()
        assert_free(port)


def test_a_program_that_answers_something_else_is_not_taken_for_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 welcome\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        problems = try_addresses(["127.0.0.1"], server.getsockname()[1], TOKEN, TIMEOUT_S)
        thread.join()
    assert problems == ["is another host or program"]


def test_a_program_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        problems = try_addresses(["127.0.0.1"], server.getsockname()[1], TOKEN, 0.05)
    assert problems == ["did not answer within 0.05 s"]


def test_what_refuses_or_has_no_name_is_said() -> None:
    port = free_port()
    problems = try_addresses(["127.0.0.1", "no such name"], port, TOKEN, TIMEOUT_S)
    assert problems == ["refused the connection", "is not a name that is known there"]


def test_no_address_needs_no_time() -> None:
    assert try_addresses([], 1, TOKEN, TIMEOUT_S) == []


def test_a_port_that_is_taken_is_said_to_be() -> None:
    with contextlib.closing(listen_on_all(0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as error:
            PortListener(port, TOKEN)
    assert why_not_listening(port, error.value) == f"port {port} is in use"
    assert why_not_listening(1, PermissionError(13, "")) == "port 1 cannot be used: Permission denied"


def test_own_addresses_are_those_that_the_ip_command_lists() -> None:
    try:
        listed = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no ip command here")
    addresses = [ipaddress.ip_interface(line.split()[3]).ip for line in listed.splitlines()]
    expected = {str(one) for one in addresses if not (one.is_loopback or one.is_link_local)}
    assert set(own_addresses()) == expected


def test_a_listener_that_has_no_file_left_lets_go_of_who_was_answered_first() -> None:
    """Else it would be asked for the same connection again and again, and answer nobody."""
    number = free_port()
    listener = PortListener(number, TOKEN)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        first, second = (stack.enter_context(socket.socket()) for _ in range(2))
        for one in (first, second):
            one.settimeout(TIMEOUT_S)
            one.connect(("127.0.0.1", number))
        listener.accept()
        assert first.recv(64) == TOKEN.encode()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(first.fileno()))
        listener.accept()
        listener.accept()
        assert second.recv(64) == TOKEN.encode()
