"""What goes wrong on several real hosts: the right exit code, one clear message,
and no process left on any host.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Lab
from tests.launcher.command import BOTH_WAYS, BUSY_S, Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way")]

CLEAN_WITHIN_S = 15.0
STOP_WITHIN_S = 2.0  # after the first failure, beyond the grace
GRACE_S = 1
WORK = """
import os, pathlib, signal, sys, time
rank, host = os.environ["RANK"], os.uname().nodename
if "--daemon" in sys.argv:  # forked twice, in a session of its own, and it ignores what it can
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(one, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
print("up", os.getpid(), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
if f"--exit={rank}" in sys.argv:
    print("about to fail", file=sys.stderr, flush=True)
    sys.exit(3)
for word in sys.argv[1:]:
    if word.startswith(f"--kill={rank}:"):
        os.kill(os.getpid(), getattr(signal, word.partition(":")[2]))
time.sleep(0 if "--end" in sys.argv else 600)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\nnode3 slots=2\n")
    return folder


def launch(lab: Lab, folder: Path, *words: str) -> Command:
    """A job of 6 workers that are all up and wait for the file `go`."""
    command = Command(lab.head, folder, "-H", "hosts", f"--kill_grace={GRACE_S}", *words)
    command.wait_for("up ", times=6)
    return command


def assert_clean(lab: Lab) -> None:
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("--exit=5", 3, "exited with code 3"),
        ("--kill=5:SIGKILL", 137, "was killed by SIGKILL (9)"),
    ],
)
def test_the_first_failure_ends_all_hosts_at_once_and_is_named(
    lab: Lab, folder: Path, how: str, code: int, words: str
) -> None:
    """Workers that end at SIGTERM need none of the grace, which is 30 seconds here."""
    command = launch(lab, folder, "--kill_grace=30", "work.py", how)
    (folder / "go").touch()
    began = time.monotonic()
    assert lab.wait_until_clean(STOP_WITHIN_S + BUSY_S) == []
    assert time.monotonic() - began < STOP_WITHIN_S + BUSY_S
    assert command.wait() == code
    assert "dslaunch: rank 5 on node3 (local rank 1, pid " in command.err
    assert f"{words}; it failed first" in command.err
    assert "also failed" not in command.err
    assert ("    about to fail\n" in command.err) == (code == 3)


def test_what_ignores_sigterm_is_killed_when_the_grace_is_over(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "work.py", "--daemon", "--kill=4:SIGKILL")
    (folder / "go").touch()
    assert lab.wait_until_clean(STOP_WITHIN_S + GRACE_S + BUSY_S) == []
    assert command.wait() == 137
    assert "rank 4 on node3" in command.err


def test_a_normal_end_leaves_nothing_behind(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "work.py", "--daemon", "--end")
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    left = [process.argv for _, process in lab.processes()]
    assert not [argv for argv in left if "work.py" in argv], "already when the command returns"
    assert_clean(lab)  # the agents, which were the last to speak, a moment later
    assert "outlived their worker" in command.err


@pytest.mark.parametrize(
    "signum",
    few([signal.SIGINT, signal.SIGHUP], lambda signum: signum == signal.SIGINT),
)
def test_an_interrupt_stops_all_hosts(lab: Lab, folder: Path, signum: int) -> None:
    command = launch(lab, folder, "work.py")
    command.process.send_signal(signum)
    assert command.wait() == 128 + signum
    assert "stopping 6 other workers" not in command.err
    assert f"{signal.Signals(signum).name} ({signum}): stopping 6 workers" in command.err
    assert_clean(lab)


def test_a_cut_link_is_noticed_within_the_heartbeat_on_both_sides(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--heartbeat=2", "work.py", "--daemon")
    lab.host("node3").link_down()
    began = time.monotonic()
    assert command.wait() == 3
    assert time.monotonic() - began < 2 + GRACE_S + BUSY_S  # heartbeat, grace
    assert "dslaunch: node3: nothing heard for 2 s" in command.err
    assert "node1" not in command.err.replace("no GPU here", "").partition("stopping")[2]
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_silent_cut_is_noticed_too(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--heartbeat=2", "work.py")
    lab.host("node1").unplug()
    assert command.wait() == 3
    assert "dslaunch: node1: nothing heard for 2 s" in command.err
    assert_clean(lab)


def test_a_host_that_dies_is_named(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "work.py")
    lab.host("node3").die()
    assert command.wait() == 3
    assert "dslaunch: node3: the connection ended before the job did" in command.err
    assert_clean(lab)


@BOTH_WAYS
def test_every_unreachable_host_is_reported_and_no_worker_starts(lab: Lab, folder: Path) -> None:
    lab.host("node1").drop_port(
        22
    )  # silent for as long as one waits; unplugged, the kernel finds no route after 3 s
    lab.host("node2").sshd_kill()
    lab.host("node3").new_host_key()
    (lab.host("node4").home / ".ssh" / "authorized_keys").write_text("")
    (folder / "hosts").write_text("".join(f"node{number} slots=1\n" for number in range(1, 6)))
    command = Command(lab.head, folder, "-H", "hosts", "--connect_timeout=3", "work.py")
    assert command.wait() == 3
    assert time.monotonic() - command.began_at < 3 + BUSY_S
    reasons = [line for line in command.err.splitlines() if "waiting for" not in line]
    lines = {line.split(":")[1].strip(): line for line in reasons}
    assert "did not answer within 3 s" in lines["node1"]
    assert "refused the connection" in lines["node2"]
    assert "its host key has CHANGED" in lines["node3"]
    assert "ssh-keygen -R 'node3'" in lines["node3"]
    assert "root@node4 was refused" in lines["node4"]
    assert "the name node5 is not known" in lines["node5"]
    assert len(reasons) == 5
    assert command.out == ""
    assert_clean(lab)


def test_an_unknown_host_key_is_refused_with_the_fix_and_the_fix_works(
    lab: Lab, folder: Path, way: str
) -> None:
    (lab.head.home / ".ssh" / "known_hosts").write_text("")
    (folder / "work.py").write_text("print('fine')")
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node2:0", "work.py")
    assert command.wait() == 3
    (line,) = command.err.splitlines()
    shown = " (ssh-ed25519 SHA256:" if way == "ssh" else "; "
    assert line.startswith(f"dslaunch: node2: its host key is not known{shown}")
    fix = line[line.index("ssh-keyscan ") :]
    lab.head.run(["sh", "-c", fix], check=True)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node2:0", "work.py")
    assert command.wait() == 0, command.err


def test_a_wrong_key_is_refused_with_what_was_tried(lab: Lab, folder: Path, way: str) -> None:
    lab.head.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/root/other"], check=True)
    (lab.head.home / ".ssh" / "id_ed25519").unlink()
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "--ssh_identity=/root/other", "work.py")
    assert command.wait() == 3
    (line,) = command.err.splitlines()
    if way == "openssh":
        why = "OpenSSH's ssh; that host takes publickey); allow a key there, or load it with ssh-add; "
    else:
        why = "tried /root/other); allow the key there"
    assert line.startswith(f"dslaunch: node1: root@node1 was refused ({why}")
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_jump_host_that_drops_most_logins_at_once_is_tried_again(lab: Lab, folder: Path) -> None:
    """As sshd does with the 100th login of a large job; here with the second one."""
    jump = lab.host("node1")
    jump.sshd_kill()
    jump.run(["/usr/sbin/sshd", "-E", "/var/log/sshd.log", "-o", "MaxStartups=1"], check=True)
    jump.wait_for_sshd()
    targets = [node for node in lab.nodes if node is not jump]
    (lab.head.home / ".ssh" / "config").write_text(
        "".join(f"Host {one.name}\n  HostName {one.address}\n  ProxyJump node1\n" for one in targets)
    )
    (folder / "work.py").write_text("print('fine')")
    command = Command(lab.head, folder, "-H", "hosts", "-e", "node1", "work.py")
    assert command.wait() == 0, command.err
    log = jump.run(["cat", "/var/log/sshd.log"], check=True).stdout
    assert "MaxStartups" in log, "no login was dropped, so this test has seen nothing"
    jump.sshd_kill()
    jump.sshd_start()


def test_a_python_that_one_host_lacks_is_said_before_anything_starts(lab: Lab, folder: Path) -> None:
    """The interpreter that starts the job lies where only the head has it."""
    lab.head.run(["sh", "-c", f"mkdir /root/own && ln -s {sys.executable} /root/own/python3"], check=True)
    command = Command(
        lab.head,
        folder,
        *("-H", "hosts", "-i", "node1@node2", "work.py"),
        python="/root/own/python3",
        env={"PYTHONPATH": ":".join(one for one in sys.path if one)},
    )
    assert command.wait() == 3
    assert command.err == (
        "dslaunch: node[1-2]: no Python at /root/own/python3; every host needs the same path to it, or use "
        "--venv_script, or say python= in the hostfile (2 hosts)\n"
    )
    assert command.out == ""
    assert_clean(lab)


def test_a_folder_that_the_hosts_lack_is_said_before_anything_starts(lab: Lab, folder: Path) -> None:
    lab.head.run(["sh", "-c", f"mkdir /root/only-here; cp {folder}/* /root/only-here"], check=True)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "work.py", cwd="/root/only-here")
    assert command.wait() == 3
    assert command.err == (
        "dslaunch: node1: cannot use the folder /root/only-here: No such file or directory; "
        "start from a folder that every host has at that path, bring it there with --sync, or say "
        "cwd= in the hostfile\n"
    )
    assert_clean(lab)


def test_a_missing_script_is_a_mistake(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1@node2", "trian.py")
    assert command.wait() == 2
    assert f"no script trian.py in {folder}" in command.err
    assert_clean(lab)
