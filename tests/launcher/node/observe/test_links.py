"""What an agent sees of its workers' connections, with real sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from dslaunch.launcher.node.observe import links
from dslaunch.launcher.node.observe.links import COST, MAX_PEERS, OTHERS, Links
from tests.lab import Lab

READ = """
import socket, threading
listener = socket.create_server(('', 7000))
print('listens', flush=True)
def read(one):
    while one.recv(1 << 20): pass
while True: threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()
"""

WRITE = """
import os, socket, sys
out = socket.create_connection((sys.argv[1], 7000))
print(os.getpid(), flush=True)
while True: out.sendall(bytes(1 << 16))
"""

# For three seconds; what was seen, and the part of a core that it took.
LOOK = """
import json, sys, time
from dslaunch.launcher.node.observe.links import Links
one = Links(lambda: [int(sys.argv[1])])
one.look(time.monotonic())
used, began = time.process_time(), time.monotonic()
found = []
while time.monotonic() < began + 3:
    time.sleep(0.1)
    found.append(one.look(time.monotonic()))
used = (time.process_time() - used) / (time.monotonic() - began)
print(json.dumps([used, [one for one in found if one]]))
"""


def test_connections_within_a_host_are_no_links() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        one = Links(lambda: [os.getpid()])
        for _ in range(3):
            client.sendall(b"x")
            assert one.look(time.monotonic() + 1000) is None
        client.close()
        other.close()


def test_a_host_that_does_not_let_it_look_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def refuse(*words: object) -> socket.socket:
        looks.append(words)
        raise PermissionError

    monkeypatch.setattr(links._socket, "socket", refuse)
    one = Links(lambda: [])
    assert [one.look(float(now)) for now in (1, 100)] == [None, None]
    assert len(looks) == 1


def connection(
    peer: str, number: int, *, busy_us: int = 0, unread_us: int = 0, acked: int = 0
) -> links._Socket:
    return links._Socket(
        socket.AF_INET, b"%d" % number, number, "10.0.0.1", peer, busy_us, unread_us, acked, 0, 0, 1000
    )


def test_each_connection_counts_for_what_was_to_go_through_it() -> None:
    before = {one.name: one for one in (connection("b", 1), connection("b", 2), connection("c", 3))}
    now = [
        connection("b", 1, busy_us=1_500_000, unread_us=500_000, acked=3_000_000),
        connection("b", 2, busy_us=2_000_000),  # the last word of something, lost again and again
        connection("c", 3, busy_us=9_000_000, unread_us=9_000_000, acked=10),
        connection("d", 4, busy_us=1_000_000),  # it is new
    ]
    found = links._growth(before, {one.name: one for one in now}, 2.0)
    assert found is not None
    assert found["seconds"] == 2.0
    assert found["from"] == ["10.0.0.1"]
    assert found["to"].keys() == {"b", "c"}
    assert found["to"]["b"] == {"wait": 0.5, "out": 1_500_000, "resent": 0.0, "queued": 0, "rtt_ms": 1.0}
    assert found["to"]["c"]["wait"] == 0.0, "the other side does not read"


def test_of_many_peers_those_are_told_whose_data_wait_longest() -> None:
    peers = range(3 * MAX_PEERS)
    before = {one.name: one for one in (connection(f"p{peer}", peer) for peer in peers)}
    now = (connection(f"p{peer}", peer, busy_us=1000 * peer, acked=1000) for peer in peers)
    found = links._growth(before, {one.name: one for one in now}, 1.0)
    assert found is not None
    assert found["to"].keys() == {OTHERS, *(f"p{peer}" for peer in peers[2 * MAX_PEERS :])}
    assert found["to"][OTHERS]["out"] == 2 * MAX_PEERS * 1000


@pytest.mark.slow
def test_a_slow_link_of_a_worker_is_seen_with_its_rate(lab: Lab) -> None:
    """And no other program of its host, nor the other direction."""
    sender, reader, other = lab.nodes[:3]
    sender.slow_down(80, to=reader)
    words = [sys.executable, "-u", "-c"]
    for node in (reader, other):
        assert first_line(node.popen([*words, READ], stdout=subprocess.PIPE)) == "listens"
    pid = first_line(sender.popen([*words, WRITE, reader.address], stdout=subprocess.PIPE))
    assert first_line(sender.popen([*words, WRITE, other.address], stdout=subprocess.PIPE)).isdigit()
    used, found = json.loads(sender.run([*words, LOOK, pid]).stdout)
    assert found
    for one in found:
        assert one["from"] == [sender.address]
        assert one["to"].keys() == {reader.address}
    last = found[-1]["to"][reader.address]
    assert last["wait"] > 0.8
    assert last["out"] == pytest.approx(80e6 / 8, rel=0.5)
    assert last["queued"] > 0
    print(f"{used:.4%} of a core")
    assert used < 20 * COST, "of a core; most of it is this test's own"


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    with process.stdout as stdout:
        line: bytes = stdout.readline()
    return line.decode().strip()
