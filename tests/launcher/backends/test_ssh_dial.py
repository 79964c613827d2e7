"""Connections to sshd that are begun early, on real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.backends.ssh_config import Target
from dslaunch.launcher.backends.ssh_dial import Dial, EarlyDials, PromptSocket, dial
from dslaunch.launcher.errors import EXIT_HOST, LaunchError

DEADLINE_S = 20.0

HOP = Target(
    address="127.0.0.2",
    port=22,
    user="ada",
    identities=(),
    has_only_these_identities=False,
    host_key_name="w0",
    known_hosts=(),
    unknown_host_keys="refuse",
    proxy_command=None,
    jumps=(),
    connect_timeout_s=DEADLINE_S,
)


@pytest.fixture
def sshd() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        server.settimeout(DEADLINE_S)
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as server:
        return port_of(server)


def test_a_connection_that_was_begun_early_is_the_one_that_is_used(sshd: socket.socket) -> None:
    hop = HOP._replace(port=port_of(sshd))
    early = EarlyDials({3: hop})
    accepted, peer = sshd.accept()
    with accepted, dial(hop, early.take(3)) as sock:
        assert sock.getsockname() == peer
        accepted.sendall(b"SSH-2.0")
        assert sock.recv(7) == b"SSH-2.0"


def test_what_nobody_took_is_closed(sshd: socket.socket) -> None:
    early = EarlyDials({0: HOP._replace(port=port_of(sshd))})
    accepted, _ = sshd.accept()
    early.close()
    with accepted:
        accepted.settimeout(DEADLINE_S)
        assert accepted.recv(1) == b""
    assert early.take(0) is None


@pytest.mark.parametrize("way", [{"jumps": (HOP,)}, {"proxy_command": "nc w0 22"}])
def test_a_host_behind_another_is_not_dialled(way: dict[str, Any], sshd: socket.socket) -> None:
    direct = HOP._replace(port=port_of(sshd))
    early = EarlyDials({0: direct._replace(**way), 1: direct})
    accepted, peer = sshd.accept()
    with accepted, dial(direct, early.take(1)) as sock:
        assert sock.getsockname() == peer
    assert early.take(0) is None


def test_a_name_that_nobody_knows_does_not_keep_the_next_host_from_being_dialled(sshd: socket.socket) -> None:
    early = EarlyDials({0: HOP._replace(address="no..name"), 1: HOP._replace(port=port_of(sshd))})
    accepted, _ = sshd.accept()
    accepted.close()
    assert early.take(0) is None
    early.close()


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.2", "127.0.0.2 port {port} refused the connection; is sshd running there, on this port?"),
        ("no..name", "the name no..name is not known; correct the hostfile, DNS or /etc/hosts"),
        ("224.0.0.1", "cannot reach 224.0.0.1 port {port}: Network is unreachable"),
    ],
)
def test_a_host_that_cannot_be_reached_is_told_of_in_one_sentence(
    address: str, message: str, is_early: bool
) -> None:
    hop = HOP._replace(address=address, port=free_port())
    with pytest.raises(LaunchError) as raised:
        dial(hop, EarlyDials({0: hop}).take(0) if is_early else None)
    assert str(raised.value) == message.format(port=hop.port)
    assert raised.value.exit_code == EXIT_HOST


def test_a_host_that_does_not_answer_is_given_up_when_the_time_is_over() -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=0) as full:
        hop = HOP._replace(port=port_of(full), connect_timeout_s=0.1)
        waiting = [Dial(hop), Dial(hop)]
        for one in waiting:
            one.begin()
        with pytest.raises(LaunchError, match=r"did not answer within 0\.1 s; is"):
            dial(hop)
        for one in waiting:
            one.close()


def test_a_host_that_answered_in_time_is_reached_however_late_we_look(sshd: socket.socket) -> None:
    """We may have been stopped, or busy with loading, for longer than the host may take."""
    begun = Dial(HOP._replace(port=port_of(sshd), connect_timeout_s=1e-9))
    begun.begin()
    accepted, peer = sshd.accept()
    with accepted, begun.finish() as sock:
        assert sock.getsockname() == peer


def known_as(
    monkeypatch: pytest.MonkeyPatch, *addresses: tuple[socket.AddressFamily, tuple[Any, ...]]
) -> None:
    found = [(family, socket.SOCK_STREAM, 0, "", address) for family, address in addresses]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, port, family, *_: [one for one in found if family in (0, one[0])]
    )


def test_the_next_address_of_a_host_is_tried_when_the_first_fails(
    sshd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = (free_port(), port_of(sshd))
    known_as(monkeypatch, *((socket.AF_INET, ("127.0.0.2", port)) for port in ports))
    with dial(HOP) as sock:
        assert sock.getpeername() == sshd.getsockname()


def test_an_address_that_is_silent_holds_up_the_next_for_a_moment_only(
    sshd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=0) as full:
        waiting = [Dial(HOP._replace(port=port_of(full))) for _ in range(2)]
        for one in waiting:
            one.begin()
        silent = (socket.AF_INET, ("127.0.0.2", port_of(full)))
        known_as(monkeypatch, silent, silent, (socket.AF_INET, sshd.getsockname()))
        began = time.monotonic()
        with dial(HOP) as sock:
            assert sock.getpeername() == sshd.getsockname()
        assert time.monotonic() - began < HOP.connect_timeout_s / 2
        for one in waiting:
            one.close()


def test_the_other_kind_of_address_does_not_wait_for_all_of_the_first(
    sshd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = (socket.AF_INET6, ("100::1", 22, 0, 0))
    known_as(monkeypatch, nowhere, nowhere, nowhere, (socket.AF_INET, sshd.getsockname()))
    assert [family for family, _ in Dial(HOP)._addresses][:3] == [
        socket.AF_INET6,
        socket.AF_INET,
        socket.AF_INET6,
    ]
    with dial(HOP) as sock:
        assert sock.family == socket.AF_INET


def test_the_kind_of_address_that_the_configuration_wants_is_the_only_one_tried(
    sshd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_as(monkeypatch, (socket.AF_INET6, ("::1", free_port(), 0, 0)), (socket.AF_INET, sshd.getsockname()))
    with dial(HOP._replace(family=socket.AF_INET)) as sock:
        assert sock.family == socket.AF_INET
    with pytest.raises(LaunchError):
        dial(HOP._replace(family=socket.AF_INET6))


@pytest.mark.slow
def test_a_job_dials_before_it_loads_paramiko(sshd: socket.socket, tmp_path: Path) -> None:
    """This paramiko takes until the test says so; a job that loads it first dials too late."""
    (tmp_path / "paramiko.py").write_text("import sys\nsys.stdin.readline()\nraise SystemExit(7)\n")
    (tmp_path / "hosts").write_text(f"127.0.0.2 slots=1 port={port_of(sshd)}\n")
    (tmp_path / "config").write_text("")
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "dslaunch", "-H", tmp_path / "hosts"),
            *("--ssh_config", tmp_path / "config", "train.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
    )
    accepted, _ = sshd.accept()
    accepted.close()
    job.communicate(b"\n")
    assert job.returncode == 7


@pytest.mark.skipif(
    not hasattr(socket, "TCP_QUICKACK"), reason="only Linux lets a program acknowledge at once"
)
def test_what_is_received_is_acknowledged_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, PromptSocket() as ours:
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
        with theirs:
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            theirs.sendall(b"hello")
            assert ours.recv(5) == b"hello"
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
