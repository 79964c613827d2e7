"""Detached jobs on hosts over SSH: what they survive, what ends them, and that `dslaunch jobs` says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command
from tests.launcher.local_job import poll

pytestmark = pytest.mark.slow

CLEAN_WITHIN_S = 15.0
HEARTBEAT_S = 2
NUM_RANKS = 3
WORK = """
import os, pathlib, sys, time
print("up", os.environ["RANK"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("went", flush=True)
"""
OPTIONS = ("--detach", "-H", "hosts", "--kill_grace=1", f"--heartbeat={HEARTBEAT_S}", "work.py")
PROGRAM = (sys.executable, "-m", "dslaunch")


@pytest.fixture
def folder(folder: Path, lab: Lab) -> Path:
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    return folder


def ask(host: Host, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return host.run([*PROGRAM, *words], env=env)


def job(lab: Lab, name: str = "work") -> dict[str, Any]:
    listed = ask(lab.head, "jobs", "--json")
    assert listed.returncode == 0, listed.stderr
    (found,) = [one for one in json.loads(listed.stdout) if one["name"] == name]
    return dict(found)


def forget(lab: Lab) -> None:
    """The records of earlier tests, whose jobs are gone."""
    lab.head.run(["rm", "-rf", str(lab.head.home / ".local" / "state")], check=True)


def detach(lab: Lab, folder: Path, *more: str) -> None:
    forget(lab)
    command = Command(lab.head, folder, *OPTIONS, *more)
    assert command.wait() == 0, command.err
    assert command.out == "work\n"
    wait_for_up(lab)


def wait_for_up(lab: Lab) -> None:
    poll(lambda: ask(lab.head, "logs", "work").stdout.count("| up") == NUM_RANKS, "all ranks up")


def wait_for_state(lab: Lab, state: str) -> dict[str, Any]:
    poll(lambda: job(lab)["state"] == state, f"{state}: {job(lab)}")
    return job(lab)


def launcher(lab: Lab) -> int:
    """The job's own process, as this machine sees it."""
    (pid,) = [one.pid for one in lab.head.processes() if "--detach" in one.argv]
    return pid


def test_the_login_that_started_it_and_sshd_end_and_the_job_goes_on(lab: Lab, folder: Path) -> None:
    """A login with a terminal from another host; its sshd is killed, and then all of the head's."""
    forget(lab)
    words = " ".join((*PROGRAM, *OPTIONS))
    login = lab.host("node4").popen(
        ["ssh", "-tt", "head", f"cd {folder} && {words}; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    poll(lambda: '"running"' in ask(lab.head, "jobs", "--json").stdout, "the job started by a login")
    lab.head.run(["pkill", "-9", "-f", "sshd: root@pts"], check=True)
    login.communicate(timeout=20)
    lab.head.sshd_kill()
    wait_for_up(lab)
    assert job(lab)["state"] == "running"
    (folder / "go").touch()
    attached = ask(lab.head, "attach", "work")
    assert attached.returncode == 0, attached.stderr
    assert sorted(attached.stdout.splitlines())[-2:] == ["node3:2 | up 2", "node3:2 | went"]
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_the_launcher_killed_by_9_is_a_lost_job_that_leaves_nothing(lab: Lab, folder: Path) -> None:
    detach(lab, folder)
    os.kill(launcher(lab), signal.SIGKILL)
    found = wait_for_state(lab, "lost")
    assert "was killed; the hosts end its workers when they miss it" in found["why"]
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []
    attached = ask(lab.head, "attach", "work")
    assert attached.returncode == 137
    assert "dslaunch: work is lost: " in attached.stderr
    stopped = ask(lab.head, "stop", "work")
    assert stopped.returncode == 0
    assert "is lost" in stopped.stderr


def test_an_agent_killed_by_9_ends_the_job_and_is_named(lab: Lab, folder: Path) -> None:
    detach(lab, folder)
    _, agent = sorted(one.pid for one in lab.host("node2").processes() if "exec(eval(" in one.argv)
    os.kill(agent, signal.SIGKILL)
    found = wait_for_state(lab, "ended")
    assert found["exit_code"] == 3
    assert found["verdict"].startswith("node2: the agent ended: it was killed by SIGKILL")
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []
    attached = ask(lab.head, "attach", "work")
    assert attached.returncode == 3
    assert "dslaunch: node2: the agent ended: it was killed by SIGKILL" in attached.stderr


def test_another_host_with_the_same_records_sends_there(lab: Lab, folder: Path) -> None:
    """Hosts of the lab share a kernel, as containers do: the lock is seen, and the process is not reached."""
    (folder / "hosts").write_text("node1 slots=1\n")
    state = folder / "state"
    state.mkdir(mode=0o700)
    command = Command(lab.head, folder, *OPTIONS, env={"XDG_STATE_HOME": str(state)})
    assert command.wait() == 0, command.err
    env = {"XDG_STATE_HOME": str(state)}
    listed = json.loads(ask(lab.host("node1"), "jobs", "--json", **env).stdout)
    assert [one["state"] for one in listed] == ["running"]
    refused = ask(lab.host("node1"), "stop", "work", **env)
    assert refused.returncode == 2
    assert "runs in a container of its own" in refused.stderr
    (record,) = state.rglob("job.json")
    text = record.read_text()
    record.write_text(text.replace(json.loads(text)["boot_id"], "another"))
    refused = ask(lab.host("node1"), "stop", "work", **env)
    assert refused.returncode == 2
    assert "runs on head, and is reached from there only: ssh head dslaunch stop work." in refused.stderr
    (folder / "go").touch()
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


@pytest.mark.exhaustive
def test_a_host_that_loses_its_network_ends_a_detached_job(lab: Lab, folder: Path) -> None:
    detach(lab, folder)
    lab.host("node3").unplug()
    found = wait_for_state(lab, "ended")
    assert found["exit_code"] == 3
    assert found["verdict"].startswith("node3: ")
    lab.host("node3").plug()
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


@pytest.mark.exhaustive
def test_a_reboot_of_the_head_is_a_lost_job_that_leaves_nothing(lab: Lab, folder: Path) -> None:
    detach(lab, folder)
    lab.head.poweroff()
    lab.head.boot()
    assert wait_for_state(lab, "lost")["why"]
    assert lab.wait_until_clean(HEARTBEAT_S * 2 + CLEAN_WITHIN_S) == []


@pytest.mark.exhaustive
def test_detached_parts_without_ssh_end_together(lab: Lab, folder: Path) -> None:
    """`--no_ssh`: each host has a detached part of its own, and its own record."""
    nodes = lab.nodes[:3]
    words = ("--detach", "-H", "hosts", "--no_ssh", f"--master_addr={nodes[0].address}", "--kill_grace=2")
    parts = [Command(one, folder, *words, "work.py") for one in nodes]
    for one in parts:
        assert one.wait() == 0, one.err
    stopped = ask(nodes[1], "stop", "work")
    assert stopped.returncode == 0, stopped.stderr
    for one in nodes:
        poll(lambda one=one: '"ended"' in ask(one, "jobs", "--json").stdout, "the end of each part")
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []
