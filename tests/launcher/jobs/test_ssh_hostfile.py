"""What a hostfile says of its hosts, on real hosts: ranges, slots=auto, and a host's own python,
folder and variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
print(json.dumps({"rank": int(os.environ["RANK"]), "host": os.uname().nodename, "cwd": os.getcwd(),
                  "python": sys.executable, "path": sys.path, "env": dict(os.environ),
                  "agent": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[0]}))
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text(SHOW)
    return folder


def shown(command: Command) -> list[dict[str, Any]]:
    """What the ranks printed, in rank order."""
    assert command.wait() == 0, command.err
    found = [json.loads(line.partition(" | ")[2]) for line in command.out.splitlines()]
    return sorted(found, key=lambda one: int(one["rank"]))


def test_a_yaml_hostfile_starts_the_same_job(lab: Lab, folder: Path) -> None:
    (folder / "hosts.yaml").write_text("hosts: [{name: 'node[2-3]', slots: 2, env: {MINE: 010}}]\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts.yaml", "-e", "node2:0", "show.py"))
    assert [one["host"] for one in ranks] == ["node2", "node3", "node3"]
    assert {one["env"]["MINE"] for one in ranks} == {"010"}


def test_auto_takes_cpu_workers_where_there_is_no_gpu(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("node[1-2] slots=auto\nnode3 slots=2\n")
    command = Command(lab.head, folder, "-H", "hosts", "--num_gpus=2", "show.py")
    ranks = shown(command)
    assert [one["host"] for one in ranks] == [f"node{1 + rank // 2}" for rank in range(6)]
    assert command.err.count("slots=auto: looking at 2 hosts") == 1


@pytest.fixture
def gpus_of_node2(lab: Lab) -> Iterator[None]:
    """Two GPUs as AMD's driver shows them; /sys, unlike /dev, is a host's own in the lab."""
    nodes = "/root/class/kfd/kfd/topology/nodes"
    made = "".join(
        f"mkdir -p {nodes}/{one}; echo {id} >{nodes}/{one}/gpu_id; " for one, id in enumerate((0, 7, 9))
    )
    lab.host("node2").run(["sh", "-c", f"{made} mount --bind /root/class /sys/class"], check=True)
    yield
    lab.host("node2").run(["umount", "/sys/class"], check=True)


@pytest.mark.usefixtures("gpus_of_node2")
def test_auto_counts_the_gpus_of_each_host(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("node[1-2] slots=auto\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", "show.py"))
    assert [(one["host"], one["env"].get("CUDA_VISIBLE_DEVICES")) for one in ranks] == [
        ("node1", None),
        ("node2", "0,1"),
        ("node2", "0,1"),
    ]


@pytest.mark.usefixtures("gpus_of_node2")
@pytest.mark.parametrize(
    ("words", "visible"),
    [([], "1,GPU-1f,0"), (["-i", "node2:0,GPU-1f"], "GPU-1f,0")],
)
def test_the_devices_of_the_hostfile_are_visible_in_their_order(
    lab: Lab, folder: Path, words: list[str], visible: str
) -> None:
    (folder / "hosts").write_text("node2 devices=1,GPU-1f,0\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", *words, "show.py"))
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in ranks] == [visible] * len(visible.split(","))


def test_auto_names_every_host_that_is_down_and_starts_nothing(lab: Lab, folder: Path) -> None:
    lab.host("node2").sshd_kill()
    (folder / "hosts").write_text("node[1-2] slots=auto\nnobody slots=auto\n")
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert command.wait() == 3
    assert "slots=auto needs a look at each host: node2: " in command.err
    assert "refused the connection" in command.err
    assert "nobody: the name nobody is not known" in command.err
    assert command.out == ""


def test_auto_does_not_look_at_hosts_that_are_left_out(lab: Lab, folder: Path) -> None:
    lab.host("node2").sshd_kill()
    (folder / "hosts").write_text("node[1-2] slots=auto\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", "-e", "node2", "show.py"))
    assert [one["host"] for one in ranks] == ["node1"]


def test_a_host_s_own_python_folder_and_variables_take_effect_there_only(lab: Lab, folder: Path) -> None:
    node = lab.host("node2")
    node.run(["sh", "-c", f"mkdir '/root/my job' && cp {folder}/show.py '/root/my job'"], check=True)
    node.run(["sh", "-c", f"mkdir /root/own && ln -s {sys.executable} /root/own/python3"], check=True)
    (folder / "hosts").write_text(
        "node1 slots=1\n"
        "node2 slots=1 python=~/own/python3 cwd='~/my job' env.MINE='a  b' env.BOTH=$BOTH-2 env.RANK=9 "
        "env.AT=$HOME/x env.LITERAL='$HOME'\n"
    )
    (folder / ".deepspeed_env").write_text("BOTH=1\n")
    command = Command(
        lab.head,
        folder,
        *("-H", "hosts", "show.py"),
        env={"PYTHONPATH": ":".join(one for one in sys.path if one)},  # the link above has no packages
    )
    first, second = shown(command)
    assert (first["host"], first["cwd"], first["python"]) == ("node1", str(folder), sys.executable)
    assert (second["host"], second["cwd"], second["python"]) == ("node2", "/root/my job", "/root/own/python3")
    assert first["env"]["BOTH"] == "1"
    assert "MINE" not in first["env"]
    assert first["agent"] == second["agent"] == sys.executable, "~/ is not for a login shell"
    names = ("MINE", "BOTH", "RANK", "AT", "LITERAL")
    assert [second["env"][name] for name in names] == ["a  b", "1-2", "1", "/root/x", "$HOME"]
    assert second["env"]["PYTHONPATH"].startswith(f"/root/my job:{folder}")
    assert second["path"][0] == "/root/my job"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("cwd=/", "node1: no script show.py in /"),
        ("devices=GPU-1f", "node1: device GPU-1f is asked for, but there is no GPU here; correct devices="),
    ],
)
def test_what_a_host_has_not_is_said_before_anything_starts(
    lab: Lab, folder: Path, key: str, message: str
) -> None:
    slots = "" if key.startswith("devices") else "slots=1 "
    (folder / "hosts").write_text(f"node1 {slots}{key}\nnode2 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert command.wait() in (2, 3)
    assert message in command.err
    assert command.out == ""


def test_the_user_and_port_of_the_hostfile_are_those_of_the_login(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("node1 slots=1 user=root port=22\nnode2 slots=1 user=nosuchuser\n")
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert command.wait() == 3
    assert "node2: nosuchuser@" in command.err
    assert "node1:" not in command.err


def test_a_profile_starts_the_job_that_it_describes(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("node[1-2] slots=2\n")
    (folder / "job.yaml").write_text("{hostfile: hosts, num_gpus: 1, script: show.py, args: [--x]}\n")
    ranks = shown(Command(lab.head, folder, "--profile", "job.yaml", "--num_gpus", "2"))
    assert [one["host"] for one in ranks] == ["node1", "node1", "node2", "node2"]
