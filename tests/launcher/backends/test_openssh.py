"""An ssh that runs its command on this machine, or does what else a test wants: what we make of it, and that
nothing of it stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.backends.bootstrap import NO_STDIN
from dslaunch.launcher.backends.child_starter import ChildStarter
from dslaunch.launcher.backends.openssh import OpenSsh, OpenSshChannel
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.plan import NodePlan
from dslaunch.launcher.options.hosts import SshOptions

TIMEOUT_S = 20.0
NONE = SshOptions()
LOCAL = """
for word in "$@"; do last=$word; done
exec sh -c "$last"
"""  # the remote command is the last word
Ssh = Callable[..., OpenSshChannel]


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    """Connects to the host w0 by an ssh that is this shell script."""

    def connect(
        text: str = LOCAL, *, options: SshOptions = NONE, timeout_s: float | None = 5
    ) -> OpenSshChannel:
        program = tmp_path / "ssh"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = -G ] && echo hostname w0.lab && echo connecttimeout 7 && exit\n{text}'
        )
        program.chmod(0o755)
        node = NodePlan(node_rank=0, host=Host(name="w0", slots=1), is_local=False, devices=(), ranks=())
        return OpenSsh(str(program), options, heartbeat_s=7).connect(node, timeout_s)

    return connect


def read_all(channel: OpenSshChannel) -> bytes:
    found = b""
    while data := channel.read():
        found += data
    return found


def test_an_ssh_that_passes_no_input_on_says_so(ssh: Ssh) -> None:
    channel = ssh(f"exec </dev/null{LOCAL}")
    assert read_all(channel) == b""
    assert channel.error_text() == NO_STDIN
    channel.close()


@pytest.mark.slow
def test_bytes_go_both_ways_after_what_login_scripts_print(ssh: Ssh) -> None:
    channel = ssh(f"echo welcome\nSSH_CONNECTION='127.0.0.1 1 w0 22'\nexport SSH_CONNECTION{LOCAL}")
    assert channel.local_address == "127.0.0.1"
    channel.write(repr("import os, sys; os.write(1, os.read(0, 100)[::-1]); sys.exit(7)").encode() + b"\n")
    channel.write(b"abc")
    assert read_all(channel) == b"cba"
    assert channel.exit_status() == 7
    channel.close()
    with pytest.raises(OSError, match="closed"):
        channel.write(b"late")


def test_an_address_that_is_not_ours_is_not_told(ssh: Ssh) -> None:
    """As behind a jump host, where sshd sees that one."""
    channel = ssh(f"SSH_CONNECTION='192.0.2.1 1 w0 22'\nexport SSH_CONNECTION{LOCAL}")
    assert channel.local_address == ""
    channel.close()


def test_what_was_given_is_said_and_nothing_else_about_the_host(ssh: Ssh, tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    (tmp_path / "config").touch()
    given = SshOptions(port=23, user="ada", identity=str(tmp_path / "key"), config=str(tmp_path / "config"))
    ssh(f'echo "$@" > {tmp_path}/said{LOCAL}', options=given).close()
    words = (tmp_path / "said").read_text().split(" exec /bin/sh ")[0]
    assert words == (
        "-T -a -x -o NoHostAuthenticationForLocalhost=no -o BatchMode=yes -o ConnectTimeout=5 "
        "-o ServerAliveInterval=4 -o ServerAliveCountMax=3 -o ControlMaster=no -o ClearAllForwardings=yes "
        "-o LogLevel=ERROR -o RemoteCommand=none "
        f"-o PermitLocalCommand=no -F {tmp_path}/config -p 23 -l ada -i {tmp_path}/key -- w0"
    )


def test_without_a_time_for_the_connection_that_of_its_configuration_counts(ssh: Ssh, tmp_path: Path) -> None:
    ssh(f'echo "$@" > {tmp_path}/said{LOCAL}', timeout_s=None).close()
    assert " -o ConnectTimeout=7 " in (tmp_path / "said").read_text()


def test_a_login_that_ends_without_an_agent_is_for_the_reader_to_explain(ssh: Ssh) -> None:
    channel = ssh("echo only mail here; echo no shell >&2; exit 1")
    assert read_all(channel) == b"only mail here\n"
    assert (channel.exit_status(), channel.error_text()) == (1, "no shell")
    channel.close()


@pytest.mark.slow
def test_a_dropped_login_is_tried_again_until_the_time_is_used(ssh: Ssh, tmp_path: Path) -> None:
    drop = f"echo x >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -ge 3 ] || {{ "
    drop += "echo 'kex_exchange_identification: Connection closed by remote host' >&2; exit 255; }\n"
    ssh(drop + LOCAL).close()
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match="the connection ended during the login: kex_exchange_identification"
    ):
        ssh(drop.replace("-ge 3", "-ge 99"), timeout_s=1)
    assert time.monotonic() - began < TIMEOUT_S


def test_a_refusal_is_not_tried_again_and_told_in_our_words(ssh: Ssh, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is not known; if the right host answers there: ssh-keyscan w0"):
        ssh(f"echo x >> {tmp_path}/tries; echo 'Host key verification failed.' >&2; exit 255")
    assert (tmp_path / "tries").read_text() == "x\n"


@pytest.mark.slow
def test_one_that_says_nothing_is_given_up_and_killed(
    ssh: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores SIGTERM, and has started another one."""
    monkeypatch.setattr("dslaunch.launcher.backends.openssh.START_MARGIN_S", 0.5)
    monkeypatch.setattr("dslaunch.launcher.backends.openssh.END_WITHIN_S", 0.5)
    with pytest.raises(LaunchError, match=r"nothing came within 1\.5 s, neither an agent"):
        ssh(
            f"trap '' TERM; echo $$ > {tmp_path}/pids; sleep 600 & echo $! >> {tmp_path}/pids; wait; wait",
            timeout_s=0.5,
        )
    for pid in (tmp_path / "pids").read_text().split():
        assert_ends(int(pid))


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{psutil.Process(pid).cmdline()} is still there"
        time.sleep(0.01)


def test_the_connection_is_no_word_of_the_host(ssh: Ssh) -> None:
    channel = ssh("echo 'client_loop: send disconnect: Broken pipe' >&2\n" + LOCAL)
    channel.write(b'__import__("os")._exit(255)\n')
    assert read_all(channel) == b""
    assert channel.exit_status() is None
    assert channel.error_text() == ""
    channel.close()


def test_much_that_is_written_beside_the_stream_holds_up_nothing(ssh: Ssh) -> None:
    channel = ssh()
    code = (
        "import sys; sys.stderr.write('y' * 3_000_000 + 'end'); sys.stderr.flush(); print('done', flush=True)"
    )
    channel.write(repr(code).encode() + b"\n")
    assert read_all(channel) == b"done\n"
    assert channel.error_text().endswith("yyyend")
    channel.close()


def test_a_program_ends_with_the_process_that_started_it_and_not_with_a_thread(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from dslaunch.launcher.backends.child_starter import child_starter\n"
        "def start():\n"
        "    print(child_starter().start(('sleep', '600'), dict(os.environ)).pid, flush=True)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.Process(pid).name() == "sleep", "the thread has ended, and it runs"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert_ends(pid)


def test_a_program_that_cannot_be_started_is_an_error_of_who_asked() -> None:
    starter = ChildStarter()
    with pytest.raises(FileNotFoundError):
        starter.start(("/no/such/program",), dict(os.environ))
    process = starter.start(("true",), dict(os.environ))
    assert process.wait(TIMEOUT_S) == 0, "it goes on"
