"""pdsh's command line, and who may connect back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.backends import pdsh
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import select
from dslaunch.launcher.job.plan import NodePlan, plan_nodes, plan_program
from dslaunch.launcher.options.hosts import SshOptions

HOSTS = (Host(name="w0", slots=1), Host(name="w1", slots=1, user="ada"))


def test_one_agent_on_each_host_and_all_at_the_same_time() -> None:
    argv = pdsh.pdsh_command(
        HOSTS, launcher_args=("-d",), here="head", port=4000, token="0123", python="/opt/py"
    )
    assert argv[:-1] == ("pdsh", "-S", "-R", "ssh", "-f", "2", "-w", "w0,ada@w1", "-d")
    assert argv[-1].startswith("exec /bin/sh -c '")
    assert argv[-1].count("%") == 1, (
        "pdsh replaces %n with the number of the host, and more than that elsewhere"
    )
    assert '("0123 %n"+chr(10))' in argv[-1]
    assert "\n" not in argv[-1]
    assert "\\" not in argv[-1]


@pytest.mark.parametrize(
    ("hosts", "options", "given", "expected"),
    [
        ((), SshOptions(), "", "-oBatchMode=yes"),
        ((), SshOptions(), "-v", "-v -oBatchMode=yes"),
        ((22, 22), SshOptions(), "", "-oBatchMode=yes -p 22"),
        ((None, 22), SshOptions(port=22), "", "-oBatchMode=yes -p 22"),
        ((None,), SshOptions(port=1, user="ada", identity="k", config="c", connect_timeout_s=2.5), "",
         "-oBatchMode=yes -p 1 -l ada -i k -F c -oConnectTimeout=2"),
    ],
)  # fmt: skip
def test_options_for_ssh_go_where_pdsh_passes_them_on(
    hosts: tuple[int | None, ...], options: SshOptions, given: str, expected: str
) -> None:
    named = [Host(name=f"w{place}", slots=1, port=port) for place, port in enumerate(hosts)]
    assert pdsh.ssh_arguments(named, options, given) == expected


@pytest.mark.parametrize(
    ("ports", "options", "message"),
    [
        ((22, None), SshOptions(), "one SSH port for all hosts"),
        ((22, 23), SshOptions(port=22), "one SSH port for all hosts"),
        ((), SshOptions(identity="my key"), "pdsh passes no white space on to ssh"),
    ],
)
def test_what_pdsh_cannot_pass_on_is_refused(
    ports: tuple[int | None, ...], options: SshOptions, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        pdsh.ssh_arguments(
            [Host(name=f"w{place}", slots=1, port=port) for place, port in enumerate(ports)], options, ""
        )


def test_an_ipv6_address_is_refused() -> None:
    with pytest.raises(LaunchError, match="fd00::1: pdsh takes no IPv6 address"):
        pdsh.pdsh_command(
            [Host(name="fd00::1", slots=1)], launcher_args=(), here="h", port=1, token="t", python="p"
        )


def test_no_pdsh_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pdsh is not installed; apt-get install pdsh, or use") as refused:
        pdsh.Pdsh(nodes(), launcher_args=(), ssh=SshOptions())
    assert refused.value.exit_code == 3


def nodes() -> tuple[NodePlan, ...]:
    program = plan_program("a.py", (), python="python3")
    return plan_nodes(select(HOSTS), program, local_names=frozenset())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pdsh.Pdsh]:
    """A run whose pdsh does nothing but wait, or say what a test writes into `say`."""
    (tmp_path / "pdsh").write_text(
        "#!/bin/sh\n"
        f"while ! [ -e {tmp_path}/say ]; do /bin/sleep 0.02; done; cat {tmp_path}/say >&2; exec sleep 60\n"
    )
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(pdsh, "CLOSE_TIMEOUT_S", 0.1)  # this pdsh does not end when its agents do
    made = pdsh.Pdsh(nodes(), launcher_args=(), ssh=SshOptions())
    yield made
    made.close()
    made._process.wait(30)


def say(run: pdsh.Pdsh, words: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", run._server.getsockname()[1]), timeout=10)
    connection.sendall(words.encode())
    return connection


def is_refused(connection: socket.socket) -> bool:
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:  # closed before it read all that was sent
            return True


def test_who_says_the_token_is_the_host_s_agent(run: pdsh.Pdsh) -> None:
    with say(run, f"{run._token} 1\n") as second, say(run, f"{run._token} 0\n") as first:
        channels = [run.connect(node) for node in nodes()]
        for number, (end, channel) in enumerate(zip((first, second), channels, strict=True)):
            end.sendall(b"hello %d" % number)
            assert channel.read() == b"hello %d" % number
            channel.write(b"answer")
            assert end.recv(6) == b"answer"
            assert channel.local_address == "127.0.0.1"
        for channel in channels:
            channel.close()
        assert first.recv(1) == b""
    run._process.wait(30)  # the last channel has ended pdsh, which would sleep for longer


def test_strangers_are_refused(run: pdsh.Pdsh) -> None:
    assert is_refused(say(run, "\n"))
    assert is_refused(say(run, f"{'0' * 32} 0\n"))
    assert is_refused(say(run, f"{run._token} 2\n"))
    assert is_refused(say(run, f"{run._token} -1\n"))
    assert is_refused(say(run, f"{run._token} x\n"))
    assert is_refused(say(run, f"{run._token[:-1]}\n"))
    assert is_refused(say(run, "GET / HTTP/1.1 " + "x" * 100))


def test_a_token_counts_once_for_each_host_and_not_after_the_start(run: pdsh.Pdsh) -> None:
    port = run._server.getsockname()[1]
    with say(run, f"{run._token} 0\n"):
        channel = run.connect(nodes()[0])
        assert is_refused(say(run, f"{run._token} 0\n"))
        with say(run, f"{run._token} 1\n"):
            run.connect(nodes()[1]).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)
        channel.close()


def test_what_ssh_says_of_a_host_is_its_reason(run: pdsh.Pdsh, tmp_path: Path) -> None:
    (tmp_path / "said").write_text(
        "w0: Permission denied (publickey).\npdsh@head: w0: ssh exited with exit code 255\n"
    )
    threading.Timer(0.05, (tmp_path / "said").rename, [tmp_path / "say"]).start()
    with pytest.raises(LaunchError) as refused:
        run.connect(nodes()[0])
    assert (
        str(refused.value) == "pdsh could not start an agent there; it said: Permission denied (publickey)."
    )
    assert refused.value.exit_code == 3
    with say(run, f"{run._token} 1\n"):
        run.connect(nodes()[1]).close()
