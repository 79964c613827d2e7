"""`dslaunch check` on several real hosts: what is wrong with each is found and named,
whatever the others do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import AT_ONCE_S, Command, poll

pytestmark = pytest.mark.slow

FAKE_NVML = Path(__file__).parents[1] / "fake_nvml"
IMPORTS = ":".join(one for one in sys.path if one)
LISTEN = (
    "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"
)


def shell(host: Host, script: str) -> None:
    host.run(["sh", "-ec", script], check=True)


def found(command: Command, exit_code: int) -> dict[str, Any]:
    """The report of a check with --json."""
    assert command.wait() == exit_code, command.err
    report: dict[str, Any] = json.loads(command.out)
    assert report["exit_code"] == exit_code
    return report


def problems(report: dict[str, Any]) -> dict[str, str]:
    """What is wrong with each host, all in one text."""
    texts: dict[str, str] = {}
    for one in report["problems"]:
        for host in one["hosts"]:
            texts[host] = texts.get(host, "") + one["text"] + "\n"
    return texts


def test_hosts_without_fault_are_all_the_same(lab: Lab, folder: Path, quick_python: str) -> None:
    lines = [f"{node.name} slots=2 python={quick_python}\n" for node in lab.nodes]
    (folder / "hosts").write_text("".join(lines))
    report = found(Command(lab.head, folder, "check", "-H", "hosts", "--json"), 0)
    assert report["problems"] == []
    assert set(report["same"]) >= {
        "Python",
        "PyTorch",
        "NVIDIA driver",
        "GPUs",
        "kernel",
        "clock",
        "host name",
    }
    assert report["same"]["PyTorch"] == "2.6.0"
    assert report["same"]["Python"] == sys.version.split()[0]
    assert report["same"]["host name"] == "as in the hostfile"
    assert report["master"]["address"] == lab.host("node1").address
    assert [one["can_be_used"] for one in report["hosts"]] == [True] * 4
    for host in report["hosts"]:
        assert abs(host["clock_offset_s"]) <= host["clock_error_s"] < 1
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive
def test_one_fault_on_each_host_and_all_are_named(lab: Lab, folder: Path) -> None:
    """node1: the port is in use. node2: no sshd. node3: not the folder. node4: a login that prints a lot."""
    place = "/root/job"
    for host in (lab.head, lab.host("node1"), lab.host("node2"), lab.host("node4")):
        shell(host, f"mkdir {place}")
    (lab.host("node4").home / ".bashrc").write_text("yes 'Welcome to \x01 this cluster' | head -20000\n")
    lab.host("node2").sshd_kill()
    server = lab.host("node1").popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    words = ("check", "-H", str(folder / "hosts"), "--no_torch")
    report = found(Command(lab.head, folder, *words, "--json", cwd=place), 3)
    server.stdout.close()
    texts = problems(report)
    assert set(texts) == {"node2", "node3"}
    assert "refused the connection; is sshd running there" in texts["node2"]
    assert f"cannot use the folder {place}: No such file or directory" in texts["node3"]
    (warning,) = [one for one in report["warnings"] if "29500" in one["text"]]
    assert warning["hosts"] == ["node1"]
    assert warning["text"].startswith("port 29500 is in use by ")
    assert "another" in warning["text"]
    assert [one["can_be_used"] for one in report["hosts"]] == [True, False, False, True]
    assert report["hosts"][3]["facts"]["cwd"]["problem"] == ""
    text = Command(lab.head, folder, *words, "--master_port=29500", cwd=place)
    assert text.wait() == 3
    assert "1 of 4 hosts can be used" in text.out
    assert "  node1: port 29500 is in use by " in text.out
    assert lab.wait_until_clean() == [] or server.poll() is None


@pytest.mark.exhaustive
def test_a_python_that_hosts_lack_and_a_host_that_freezes(lab: Lab, folder: Path) -> None:
    """node1 has no such Python, node3 stops in the middle of its answers,
    node2 has a PyTorch that never comes.
    """
    own = "/root/own/python3"
    shell(lab.head, f"mkdir /root/own && ln -s {sys.executable} {own}")
    slow = 'case "$*" in *torch*) exec sleep 600;; esac'
    for name, first in (("node2", slow), ("node3", slow), ("node4", "")):
        script = lab.host(name).home / "own" / "python3"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
    words = ("check", "-H", "hosts", "--timeout=20", "--json")
    command = Command(lab.head, folder, *words, python=own, env={"PYTHONPATH": IMPORTS})
    frozen = lab.host("node3")
    poll(lambda: any("sleep 600" in one.argv for one in frozen.processes()), "the slow import", command)
    frozen.freeze()
    report = found(command, 3)
    assert time.monotonic() - command.began_at < 20 + 10
    texts = problems(report)
    assert set(texts) == {"node1", "node2", "node3"}
    assert f"no Python at {own}" in texts["node1"]
    # By the host itself, or by us where it is too busy to answer in time.
    assert re.search("PyTorch cannot be imported|no answer within 20 s about torch", texts["node2"])
    assert "did not end within 18 s" in texts["node2"]
    assert "nothing heard for 1" in texts["node3"]
    facts = report["hosts"][3]["facts"]
    assert facts["torch"]["version"]
    frozen.thaw()
    assert lab.wait_until_clean() == []


# Programs that only some hosts have, or that say something else there. /sys, unlike /dev,
# is a host's own in the lab.
GPUS = """
for one in {numbers}; do
    node=/root/class/kfd/kfd/topology/nodes/$one; mkdir -p $node; echo 7 >$node/gpu_id
done
mount --bind /root/class /sys/class
"""
PROGRAM = "cat >/usr/local/sbin/{name} <<'END'\n#!/bin/sh\n{script}\nEND\nchmod 755 /usr/local/sbin/{name}\n"
PYTHON = """#!/bin/sh
case "$*" in
*platform.python_version*) echo 'dslaunch facts: "{python}"';;
*torch.version*) echo 'dslaunch facts: ["{torch}", "CUDA 12.4", "2.21.5"]';;
*nvmlInit*) PYTHONPATH={fake} FAKE_NVML=/root/own/nvml.json exec {real} "$@";;
*) exec {real} "$@";;
esac
"""


@pytest.fixture
def four_hosts_alike(lab: Lab) -> Iterator[None]:
    """Four hosts with two GPUs, a driver, numactl and PyTorch, but for one fault on each."""
    for node in lab.nodes:
        odd = {name: node.name == name for name in ("node1", "node2", "node3", "node4")}
        shell(node, GPUS.format(numbers="1" if odd["node2"] else "1 2"))
        driver = "535.54.03" if odd["node4"] else "550.90.07"
        nvidia_smi = PROGRAM.format(name="nvidia-smi", script=f"echo '{driver}, H200'; echo '{driver}, H200'")
        numactl = "" if odd["node2"] else PROGRAM.format(name="numactl", script="true")
        shell(node, "mount -t tmpfs none /usr/local/sbin\n" + nvidia_smi + numactl)
        python = node.home / "own" / "python3"
        python.parent.mkdir()
        versions = ("3.12.1", "2.5.0") if odd["node3"] else ("3.11.9", "2.6.0")
        python.write_text(
            PYTHON.format(python=versions[0], torch=versions[1], real=sys.executable, fake=FAKE_NVML)
        )
        hot = {"1": {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x48}} if odd["node4"] else {}
        record = {**json.loads((FAKE_NVML / "h100x8.json").read_text()), "nvmlDeviceGetCount": 2, "gpu": hot}
        (node.home / "own" / "nvml.json").write_text(json.dumps(record))
        python.chmod(0o755)
    shell(lab.host("node1"), "mount -o remount,size=16m /dev/shm")
    yield
    shell(lab.host("node1"), "mount -o remount,size=50% /dev/shm")
    for node in lab.nodes:
        shell(node, "umount /sys/class /usr/local/sbin")


@pytest.mark.usefixtures("four_hosts_alike")
def test_what_is_different_on_one_host_is_named_with_that_host(lab: Lab, folder: Path) -> None:
    """node1: little shared memory. node2: a GPU and numactl are missing. node3: other versions.
    node4: another driver, and a GPU that is hot.
    """
    own = "/root/own/python3"
    shell(lab.head, f"mkdir /root/own && ln -s {sys.executable} {own}")
    words = ("check", "-H", "hosts", "--json")
    report = found(Command(lab.head, folder, *words, python=own, env={"PYTHONPATH": IMPORTS}), 3)
    assert problems(report).keys() == {"node2"}
    assert problems(report)["node2"].startswith("slots=2, but there is 1 GPU; correct slots= in the hostfile")
    warnings = {one["text"]: one["hosts"] for one in report["warnings"]}
    said = {
        "/dev/shm holds 16 MiB": ["node1"],
        "Python is not the same everywhere: 3.11.9 on node[1-2,4]; 3.12.1 on node3": ["node3"],
        "PyTorch is not the same everywhere: 2.6.0, CUDA 12.4 on node[1-2,4]; 2.5.0, CUDA 12.4 on node3":
            ["node3"],
        "NVIDIA driver is not the same everywhere: 550.90.07 on node[1-3]; 535.54.03 on node4": ["node4"],
        "GPU 1: clocks are lowered by heat": ["node4"],
    }  # fmt: skip
    for text, hosts in said.items():
        assert [found for one, found in warnings.items() if text in one] == [hosts], warnings
    assert report["same"]["GPU memory"] == "2 x 80 GiB"
    assert report["different"]["numactl"]["none"] == ["node2"]
    assert [one["can_be_used"] for one in report["hosts"]] == [True, False, True, True]


@pytest.mark.exhaustive
def test_a_login_that_never_ends_is_said(lab: Lab, folder: Path, way: str) -> None:
    (lab.host("node2").home / ".bashrc").write_text("sleep 600\n")
    report = found(Command(lab.head, folder, "check", "-H", "hosts", "--no_torch", "--json"), 3)
    texts = problems(report)
    assert set(texts) == {"node2"}
    words = (
        "connected, but no agent answered within 10 s"
        if way == "ssh"
        else "nothing came within 30 s, neither "
    )
    assert words in texts["node2"]


@pytest.mark.exhaustive
def test_a_port_behind_a_firewall_is_named_for_every_host_that_needs_it(lab: Lab, folder: Path) -> None:
    lab.host("node1").drop_port(29500)
    report = found(Command(lab.head, folder, "check", "-H", "hosts", "--no_torch", "--json"), 3)
    texts = problems(report)
    assert set(texts) == {"node2", "node3", "node4"}
    for text in texts.values():
        assert (
            f"cannot reach node1, where rank 0 will listen on port 29500: {lab.host('node1').address}" in text
        )
    report = found(
        Command(lab.head, folder, "check", "-H", "hosts", "--no_torch", "--json", "--master_port=29501"), 0
    )
    assert report["master"]["address"] == lab.host("node1").address


def test_every_host_that_cannot_be_reached_has_its_reason(lab: Lab, folder: Path) -> None:
    lab.host("node1").sshd_kill()
    lab.host("node2").new_host_key()
    (lab.host("node3").home / ".ssh" / "authorized_keys").write_text("")
    command = Command(lab.head, folder, "check", "-H", "hosts", "--no_torch")
    assert command.wait() == 3
    assert "1 of 4 hosts can be used" in command.out
    assert "  node1: node1 port 22 refused the connection" in command.out
    assert "  node2: its host key has CHANGED" in command.out
    assert "  node3: root@node3 was refused" in command.out
    assert "  node4: whether they reach node 0 was not tried, because node1 cannot be used" in command.out


def test_an_interrupt_ends_a_check_at_once(lab: Lab, folder: Path) -> None:
    lab.host("node1").unplug()
    command = Command(lab.head, folder, "check", "-H", "hosts", "--no_torch", "--connect_timeout=60")
    poll(lambda: "waiting for node1" in command.err, "progress", command)
    os.kill(command.process.pid, 2)
    assert command.wait(AT_ONCE_S) == 130
    assert lab.wait_until_clean() == []
