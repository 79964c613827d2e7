"""Jobs by the system's ssh: what only those have, one process for each host. All tests of faults run by it as
well, see the fixture `way`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import BUSY_S, Command, poll

pytestmark = pytest.mark.slow

CLEAN_WITHIN_S = 15.0
HEARTBEAT_S = 2
WORK = """
import os, pathlib, time
print("up", os.getpid(), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def folder(folder: Path, lab: Lab) -> Path:
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
    (folder / "show.py").write_text('import os; print("rank", os.environ["RANK"], flush=True)')
    return folder


def job(lab: Lab, folder: Path, *words: str) -> Command:
    head = ("--launcher=openssh", "-H", "hosts", "--kill_grace=1", f"--heartbeat={HEARTBEAT_S}")
    return Command(lab.head, folder, *head, *words)


def launch(lab: Lab, folder: Path, *words: str) -> Command:
    """A job of 2 workers that are both up and wait for the file `go`."""
    command = job(lab, folder, *words, "-i", "node1@node2", "work.py")
    command.wait_for("up ", times=2)
    return command


def logins(host: Host) -> dict[str, int]:
    """The process id of each ssh of ours there, by the host that it leads to."""
    found = [one for one in host.processes() if one.argv.partition(" ")[0].endswith("/ssh")]
    return {one.argv.partition(" -- ")[2].partition(" ")[0]: one.pid for one in found}


def assert_clean(lab: Lab) -> None:
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_one_ssh_for_each_host_which_says_nothing_of_the_job(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--ssh_user=root", "--ssh_port=22", "--launcher_args=-o Compression=yes")
    assert sorted(logins(lab.head)) == ["node1", "node2"]
    (argv,) = {
        one.argv.replace("node2", "node1") for one in lab.head.processes() if "-- node" in one.argv[:400]
    } & {one.argv for one in lab.head.processes() if "-- node1 " in one.argv}
    assert " -o BatchMode=yes " in argv
    assert " -p 22 -l root -o Compression=yes -- node1 exec /bin/sh -c " in argv
    assert "work.py" not in argv
    assert str(folder) not in argv
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    assert logins(lab.head) == {}
    assert_clean(lab)


def test_an_ssh_that_is_killed_is_a_lost_host(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    os.kill(logins(lab.head)["node2"], signal.SIGKILL)
    assert command.wait() == 3
    assert "dslaunch: node2: the connection ended before the job did" in command.err
    assert logins(lab.head) == {}
    assert_clean(lab)


def test_a_stopped_ssh_is_a_silent_host_and_does_not_stay(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    os.kill(logins(lab.head)["node2"], signal.SIGSTOP)
    assert command.wait() == 3
    assert f"dslaunch: node2: nothing heard for {HEARTBEAT_S} s" in command.err
    assert logins(lab.head) == {}
    assert_clean(lab)


def test_a_launcher_killed_by_9_leaves_no_ssh_even_of_a_host_that_is_cut_off(lab: Lab, folder: Path) -> None:
    """Long before ssh itself would notice that."""
    command = launch(lab, folder, "--heartbeat=60")
    lab.host("node2").unplug()
    command.process.kill()
    command.wait()
    poll(lambda: logins(lab.head) == {}, "the end of each ssh", command, BUSY_S)
    lab.host("node2").plug()
    assert_clean(lab)


def test_a_shared_connection_that_is_killed_is_a_lost_host(lab: Lab, folder: Path) -> None:
    config = lab.head.home / ".ssh" / "config"
    config.write_text("Host node2\n  ControlPath ~/.ssh/shared-%n\n")
    lab.head.run(["ssh", "-fNM", "node2"], check=True)
    (master,) = [one.pid for one in lab.head.processes() if "-fNM" in one.argv]
    command = launch(lab, folder)
    os.kill(master, signal.SIGKILL)
    assert command.wait() == 3
    assert "dslaunch: node2: the connection ended before the job did" in command.err
    assert_clean(lab)


def test_ssh_configures_itself_and_what_it_cannot_use_is_said(lab: Lab, folder: Path) -> None:
    config = lab.head.home / ".ssh" / "config"
    jump = lab.host("node4").address
    config.write_text(
        f"Host node1\n  HostName {lab.host('node1').address}\n  ProxyJump root@{jump}\n"
        "Host node1 node4\n  RemoteCommand false\n  RequestTTY force\n"
        "  ControlMaster auto\n  ControlPath ~/.ssh/cm-%C\n  ControlPersist 60\n"
        "Host node2\n  ProxyCommand sh -c 'echo no way >&2; exit 1'\n"
        "  LogLevel QUIET\n"
        "Host node3\n  CanonicalizeHostname always\n  CanonicalDomains lab\n  CanonicalizeFallbackLocal no\n"
    )
    command = job(lab, folder, "-i", "node1@node4", "show.py")
    assert command.wait() == 0, command.err
    assert lab.head.processes() == [], "no shared connection was made"
    command = job(lab, folder, "-i", "node2@node3", "--connect_timeout=3", "show.py")
    assert command.wait() == 3
    reasons = {line.split(":")[1].strip(): line for line in command.err.splitlines() if "waiting" not in line}
    assert " ended: no way; correct it in the ssh configuration, or repair the way" in reasons["node2"]
    assert "node3: the name node3.lab. is not known" in reasons["node3"]
    assert_clean(lab)
