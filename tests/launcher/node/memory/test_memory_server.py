"""The memory server of an agent, in a process of its own: what workers, other hosts and strangers send."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dslaunch.runtime.checkpoint.storage.agent_memory import (
    AgentMemory,
    LocalFile,
    MemoryAddress,
    RemoteFile,
    StoredFile,
    held_elsewhere,
)
from dslaunch.shared.memory_messages import receive_message, send_message
from tests.launcher.node.memory.memory_hosts import TOKEN, MemoryHost, introduce, memory_hosts

SIZE = 3 << 20  # more than a socket takes at once


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[MemoryHost]]:
    with memory_hosts(tmp_path, "a", "b") as found:
        yield found


Connect = Callable[[MemoryHost], AgentMemory]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:
        yield lambda host: stack.enter_context(closing(AgentMemory(str(host.socket))))


def _address(host: MemoryHost) -> MemoryAddress:
    return MemoryAddress(host.name, ("127.0.0.1",), host.port)


def _write(memory: AgentMemory, tag: str, name: str, data: bytes) -> None:
    descriptor, _ = memory.descriptor(do="create", tag=tag, name=name, capacity=len(data))
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)
    memory.ask(do="finish", tag=tag, name=name, size=len(data))


def _greet(host: MemoryHost, token: str = TOKEN) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", host.port), timeout=10.0)
    connection.sendall(token.encode())
    return connection


def _has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_file_is_read_here_there_and_from_its_copy(hosts: list[MemoryHost], connect: Connect) -> None:
    a, _ = hosts
    memory, data = connect(a), os.urandom(SIZE)
    memory.ask(do="begin", tag="t0-1")
    _write(memory, "t0-1", "__0_0.distcp", data)
    memory.put("t0-1", ".metadata", b"small")
    assert memory.copied("t0-1") == ""
    held = StoredFile("t0-1", "a", "__0_0.distcp", SIZE)
    descriptor, answer = memory.descriptor(do="open", owner="a", tag="t0-1", name="__0_0.distcp")
    assert answer["size"] == SIZE
    with LocalFile(descriptor, SIZE) as file:
        assert file.read() == data
    for one in hosts:  # b has the copy
        assert set(held_elsewhere(_address(one), TOKEN)) == {held, StoredFile("t0-1", "a", ".metadata", 5)}
        with RemoteFile(_address(one), TOKEN, held) as file:
            file.seek(SIZE - 7)
            assert file.read() == data[-7:]


def test_two_generations_are_held_and_a_cut_one_leaves_the_kept_one(
    hosts: list[MemoryHost], connect: Connect
) -> None:
    a, _ = hosts
    memory = connect(a)
    _write(memory, "t0-1", "x", bytes(SIZE))
    memory.ask(do="keep", tag="t0-1")
    for number in range(2, 6):  # all of them are cut off before all hosts know them to be whole
        _write(memory, f"t0-{number}", "x", bytes(SIZE))
        descriptor, _ = memory.descriptor(do="create", tag=f"t0-{number}", name="y", capacity=SIZE)
        os.close(descriptor)
    assert {(one.tag, one.name) for one in memory.held()} == {("t0-1", "x"), ("t0-5", "x")}
    assert memory.surroundings().held <= 3 * SIZE  # the memory of those in between is used again
    with pytest.raises(OSError, match="t0-4 is older than t0-5"):
        memory.ask(do="begin", tag="t0-4")
    memory.ask(do="begin", tag="t1-1")  # another training
    assert {one.tag for one in memory.held()} == {"t0-1", "t0-5"}


def test_strangers_and_nonsense_are_refused_and_the_server_goes_on(
    hosts: list[MemoryHost], connect: Connect
) -> None:
    _, b = hosts
    with _greet(b, "0" * 32) as connection:
        send_message(connection, {"do": "list"})
        assert _has_hung_up(connection)  # a wrong token
    ask = {"do": "copy", "owner": "a", "tag": "t0-1", "name": "x", "size": SIZE}
    with _greet(b) as connection:  # cut in the middle of a copy
        send_message(connection, ask)
        assert receive_message(connection)[0] == {}
        connection.sendall(bytes(SIZE // 2))
    with _greet(b) as connection:
        for refused in (
            {**ask, "name": "../x"},
            {**ask, "owner": "a/b"},
            {**ask, "tag": ""},
            {**ask, "size": 1 << 60},  # a file that never ends
            {**ask, "size": -1},
            {"do": "create", "tag": "t0-1", "name": "x", "capacity": 1},  # for workers only
            {"do": []},
        ):
            send_message(connection, refused)
            assert receive_message(connection)[0]["problem"]
        connection.sendall(b"\xff\xff\xff\xff nonsense")
        assert _has_hung_up(connection)
    deadline = time.monotonic() + 10.0
    memory = connect(b)
    while held_elsewhere(_address(b), TOKEN) and time.monotonic() < deadline:
        pass
    assert memory.held() == []
    with pytest.raises(OSError, match="is not being written"):
        memory.ask(do="finish", tag="t0-1", name="x", size=1)
    _write(memory, "t0-1", "x", b"still here")
    assert [one.size for one in memory.held()] == [10]


def test_a_host_without_room_refuses_and_a_lost_partner_is_named(tmp_path: Path, connect: Connect) -> None:
    with memory_hosts(tmp_path, "small", free_bytes=SIZE) as found:
        memory = connect(found[0])
        with pytest.raises(OSError, match=f"no room for {2 * SIZE} bytes: {SIZE} are free"):
            memory.descriptor(do="create", tag="t0-1", name="x", capacity=2 * SIZE)
    with memory_hosts(tmp_path, "a", "b") as found:
        a, b = found
        memory = connect(a)
        b.close()
        _write(memory, "t0-1", "x", bytes(SIZE))
        assert memory.copied("t0-1").startswith("b cannot take the copy: ")
        with closing(MemoryHost(tmp_path, "c")) as c:
            introduce([a, c])  # the next attempt
            _write(memory, "t0-2", "x", bytes(SIZE))
            assert memory.copied("t0-2") == ""
            assert [one.tag for one in held_elsewhere(_address(c), TOKEN)] == ["t0-2"]
