"""A login that becomes no agent, or an agent that is lost: the message holds the host's own words and
the cause by name.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command, poll

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way")]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "work.py").write_text("print('fine')")
    (folder / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    (folder / "hosts").write_text("node1 slots=1\n")
    return folder


def said_of(lab: Lab, folder: Path, *words: str) -> str:
    """What a job on node1 that cannot be started says."""
    command = Command(lab.head, folder, "-H", "hosts", *words, "work.py")
    assert command.wait() == 3, command.err
    (line,) = [one for one in command.err.splitlines() if "connected, waiting" not in one]
    assert lab.wait_until_clean() == []
    return line


def bashrc(host: Host, text: str) -> None:
    (host.home / ".bashrc").write_text(text)


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("echo 'your account has expired' >&2; exit 3", 3, "your account has expired"),
        ("ulimit -n 3", 127, "Error 24"),
        ("kill -9 $$", 137, "said nothing"),
    ],
)
def test_a_login_script_that_ends_the_login_is_quoted_with_its_status(
    script: str, status: int, words: str, lab: Lab, folder: Path
) -> None:
    bashrc(lab.host("node1"), script)
    said = said_of(lab, folder)
    assert said.startswith("dslaunch: node1: no agent started there: the "), said
    assert words in said
    if status != 137:
        assert f"the login ended with status {status}, and its last words are" in said


def test_a_forced_command_is_quoted(lab: Lab, folder: Path) -> None:
    keys = lab.host("node1").home / ".ssh" / "authorized_keys"
    keys.write_text('command="echo only backups are allowed here; exit 9" ' + keys.read_text())
    said = said_of(lab, folder)
    assert "the login ended with status 9, and its last words are 'only backups are allowed here'" in said


def test_much_that_is_written_to_stderr_holds_up_nothing(lab: Lab, folder: Path) -> None:
    """More than a window of SSH holds, before the agent starts and while the job runs."""
    bashrc(
        lab.host("node1"),
        "head -c 3000000 /dev/zero | tr '\\0' x >&2\n(sleep 1; head -c 3000000 /dev/zero | tr '\\0' y >&2; "
        "touch /tmp/written) </dev/null >/dev/null &\n",
    )
    (folder / "wait.py").write_text(
        "import os, time\n"
        "while not os.path.exists('/tmp/written'):\n"
        "    time.sleep(0.01)\n"
        "print('fine', flush=True)\n"
    )
    command = Command(lab.head, folder, "-H", "hosts", "wait.py")
    assert command.wait() == 0, command.err
    assert command.lines("node1:0") == ["fine"]


def test_text_of_another_program_in_the_stream_is_quoted(lab: Lab, folder: Path) -> None:
    bashrc(lab.host("node1"), "(while ! test -e /tmp/go; do sleep 0.05; done; echo just a moment please) &\n")
    command = Command(lab.head, folder, "-H", "hosts", "wait.py")
    command.wait_for("up")
    lab.host("node1").run(["touch", "/tmp/go"], check=True)
    assert command.wait() == 3
    assert "dslaunch: node1: not a frame: b'just a moment please" in command.err
    assert "does something that a login script started print there?" in command.err
    assert lab.wait_until_clean() == []


def test_a_proxy_command_that_does_not_work_is_named(lab: Lab, folder: Path, way: str) -> None:
    command = "sh -c 'echo cannot go to %h >&2; exit 5'"
    (lab.head.home / ".ssh" / "config").write_text(f"Host node1\n  ProxyCommand {command}\n")
    said = said_of(lab, folder, "--connect_timeout=2")
    shown, status = (command.replace("%h", "node1"), " with 5") if way == "ssh" else (command, "")
    assert said.startswith(f"dslaunch: node1: ProxyCommand {shown!r} ended"), said
    assert f" ended{status}: cannot go to node1" in said


def test_a_proxy_command_is_run_by_a_shell_and_leaves_nothing_behind(lab: Lab, folder: Path) -> None:
    way = "ssh -W %h:%p node2 2>/dev/null || echo never"
    (lab.head.home / ".ssh" / "config").write_text(f"Host node1\n  ProxyCommand {way}\n")
    command = Command(lab.head, folder, "-H", "hosts", "work.py")
    assert command.wait() == 0, command.err
    assert lab.wait_until_clean() == []


def test_an_agent_that_is_killed_is_told_with_the_signal(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "--log_level=debug", "wait.py")
    command.wait_for("up")
    poll(lambda: ": agent " in command.err, "the agent's process", command)
    pid = command.err.partition(": agent ")[2].partition(",")[0]
    lab.host("node1").run(["kill", f"-{signal.SIGKILL.value}", pid], check=True)
    assert command.wait() in (3, 137)
    assert "node1: the agent ended: it was killed by SIGKILL" in command.err
    assert lab.wait_until_clean() == []


def test_a_login_shell_that_is_no_shell_is_quoted(lab: Lab, folder: Path) -> None:
    node = lab.host("node1")
    node.run(
        ["sh", "-c", "sed 's#^root:.*#root:x:0:0:root:/root:/usr/bin/python3#' /etc/passwd > /tmp/passwd"],
        check=True,
    )
    node.run(["mount", "--bind", "/tmp/passwd", "/etc/passwd"], check=True)
    try:
        assert "the login ended with status 1, and its last words are 'SyntaxError: " in said_of(lab, folder)
    finally:
        node.run(["umount", "/etc/passwd"], check=True)
