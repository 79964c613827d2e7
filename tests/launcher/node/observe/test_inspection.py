from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.node.observe.inspection import answer

PROGRAM_S = 20.0


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (['echo "550.54.15, NVIDIA H100 80GB"', 'echo "550.54.15, NVIDIA H100 80GB"'],
         ("550.54.15", ["NVIDIA H100 80GB"] * 2)),
        (["echo 'NVIDIA-SMI has failed'", "exit 9"], ("", [])),
        (["echo 'No devices were found'"], ("", [])),
        (["printf '\\377\\376'"], ("", [])),
    ],
)  # fmt: skip
def test_nvidia_smi_says_driver_and_names(
    lines: list[str],
    facts: tuple[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("the driver here has a word too")
    script(tmp_path / "nvidia-smi", *lines)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = answer("gpu", {"timeout_s": PROGRAM_S}).facts
    assert (found["driver"], found["names"]) == facts


@pytest.mark.parametrize(
    ("lines", "version", "problem"),
    [
        (["echo Welcome; echo 'dslaunch facts: \"3.9.1\"'; echo Bye"], "3.9.1", ""),
        (["echo broken >&2; echo 'cannot start' >&2; exit 1"], "", "cannot start"),
        (["exit 4"], "", "it said nothing, exit code 4"),
        (["kill -9 $$"], "", "it said nothing, signal 9"),
        (["echo 'dslaunch facts: {'"], "", "it said nothing, exit code 0"),
    ],
)
def test_a_python_is_asked_for_its_version(
    lines: list[str], version: str, problem: str, tmp_path: Path
) -> None:
    python = script(tmp_path / "python3", *lines)
    assert answer("python", {"python": python, "timeout_s": PROGRAM_S}).facts == {
        "version": version,
        "problem": problem,
    }


def test_a_program_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    python = script(tmp_path / "python3", "exec sleep 600")
    found = answer("torch", {"python": python, "timeout_s": 0.1}).facts
    assert found == {"version": "", "platform": "", "nccl": "", "problem": "did not end within 0.1 s"}


def test_the_owner_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        name = subprocess.run(
            ["cat", f"/proc/{os.getpid()}/comm"], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert answer("port_owner", {"port": port}).facts == {"owner": f"{name} (process {os.getpid()})"}
    assert answer("port_owner", {"port": port}).facts == {"owner": ""}


@pytest.mark.parametrize(
    ("path", "problem"),
    [("/nosuch", "No such file or directory"), (sys.executable, "Not a directory"), ("~", ""), ("/", "")],
)
def test_a_folder_is_there_or_the_reason_why_not_is(path: str, problem: str) -> None:
    found = answer("cwd", {"path": path}).facts
    assert found["problem"] == problem
    assert bool(found["size_bytes"]) == (not problem)


def test_what_cannot_be_answered_is_said() -> None:
    assert answer("cwd", {}).facts == {"error": "KeyError: 'path'"}
    assert answer("weather", {}).facts == {"error": "KeyError: 'weather'"}


def _sysfs(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_links_are_the_cards_that_have_a_carrier_and_the_active_ports(tmp_path: Path) -> None:
    _sysfs(
        tmp_path,
        {
            "net/eth0/speed": "25000\n",
            "net/eth0/carrier": "1\n",
            "net/eth0/device/vendor": "",
            "net/eth1/speed": "100000\n",  # no cable
            "net/eth1/carrier": "0\n",
            "net/eth1/device/vendor": "",
            "net/virtio/speed": "-1\n",
            "net/virtio/carrier": "1\n",
            "net/virtio/device/vendor": "",
            "net/docker0/speed": "10000\n",  # no device
            "net/docker0/carrier": "1\n",
            "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
            "infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)\n",
            "infiniband/mlx5_2/ports/1/rate": "10 Gb/sec (4X SDR)\n",
        },
    )
    assert answer("link", {"path": str(tmp_path)}).facts == {
        "fastest_mbit": 200_000,
        "names": ["mlx5_0:1 200 Gbit/s", "eth0 25 Gbit/s"],
        "faults": ["mlx5_1 port 1 is DOWN", "mlx5_2 port 1 is in no known state"],
    }


def test_a_host_that_tells_no_link() -> None:
    assert answer("link", {"path": "/no/such"}).facts == {"fastest_mbit": -1, "names": [], "faults": []}
