"""Hosts on which a key and an algorithm of our own SSH are not enough: jobs start there by the system's ssh,
and one line says so and why.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

CLEAN_WITHIN_S = 15.0
NEW_ONLY = ("KexAlgorithms=sntrup761x25519-sha512@openssh.com", "Ciphers=chacha20-poly1305@openssh.com")
ASKS_ONLY = ("PubkeyAuthentication=no", "KbdInteractiveAuthentication=yes")
Serve = Callable[..., None]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text('import os; print("rank", os.environ["RANK"], flush=True)')
    return folder


@pytest.fixture
def serve(lab: Lab) -> Iterator[Serve]:
    """`serve(host, "Keyword=value", ...)`: its sshd takes new logins so, and as before after the test."""
    changed: list[Host] = []

    def start(host: Host, *settings: str) -> None:
        host.sshd_kill()
        changed.append(host)
        words = [word for one in settings for word in ("-o", one)]
        host.run(["/usr/sbin/sshd", "-E", "/var/log/sshd.log", *words], check=True)
        host.wait_for_sshd()

    yield start
    for host in changed:
        host.sshd_kill()
        host.sshd_start()


def config(lab: Lab, text: str) -> None:
    (lab.head.home / ".ssh" / "config").write_text(text)


def assert_runs(command: Command, *, on: str, num_ranks: int) -> None:
    assert command.wait() == 0, command.err
    assert {line.partition(":")[0] for line in command.out.splitlines()} == set(on.split())
    assert command.out.count("rank ") == num_ranks


def test_an_sshd_without_a_common_algorithm_is_reached_and_others_as_ever(
    lab: Lab, folder: Path, serve: Serve
) -> None:
    serve(lab.host("node1"), *NEW_ONLY)
    serve(lab.host("node2"), *NEW_ONLY)
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert_runs(command, on="node1 node2 node3 node4", num_ranks=8)
    (line,) = [one for one in command.err.splitlines() if "ssh" in one]
    assert line == (
        "dslaunch: node[1-2]: reached by the system's ssh, because no key exchange is common with dslaunch's "
        "own SSH; --launcher=openssh begins with that"
    )
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_a_connection_that_is_open_already_serves_where_a_person_would_be_asked(
    lab: Lab, folder: Path, serve: Serve
) -> None:
    """The job uses the one that was opened beforehand, and leaves it open."""
    config(lab, "Host node1\n  ControlPath ~/.ssh/shared-%C\n")
    lab.head.run(["ssh", "-fNM", "node1"], check=True)
    serve(lab.host("node1"), *ASKS_ONLY)
    before = lab.head.processes()
    for words in ((), ("--launcher=openssh",)):
        command = Command(lab.head, folder, *words, "-H", "hosts", "-i", "node1@node2", "show.py")
        assert_runs(command, on="node1 node2", num_ranks=4)
        said = "node1: reached by the system's ssh, because a connection is open and shared (ControlPath)"
        assert (said in command.err) == (not words)
        assert lab.head.processes() == before
    lab.head.run(["ssh", "-O", "exit", "node1"], check=True)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
    assert command.wait() == 3
    (line,) = command.err.splitlines()
    assert line.startswith("dslaunch: node1: root@node1: it takes no key, only keyboard-interactive, which ")
    assert (
        "; by the system's ssh: root@node1 was refused (OpenSSH's ssh; that host takes keyboard-interactive); "
        in line
    )
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_one_that_needs_openssh_is_told_so_where_there_is_none(lab: Lab, folder: Path, serve: Serve) -> None:
    serve(lab.host("node1"), *NEW_ONLY)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py", env={"PATH": "/nowhere"})
    assert command.wait() == 3
    assert "have no key exchange in common" in command.err
    assert "; the system's ssh might do, but there is no program ssh on PATH; install " in command.err
    command = Command(
        lab.head, folder, "-H", "hosts", "--launcher=openssh", "show.py", env={"PATH": "/nowhere"}
    )
    assert command.wait() == 3
    assert command.err.startswith("dslaunch: --launcher=openssh: there is no program ssh on PATH; install ")
    assert len(command.err.splitlines()) == 1
