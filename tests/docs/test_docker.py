"""The commands of the guide for containers are commands of dslaunch, and its hostfile is one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.inputs.hostfile import parse_hostfile
from dslaunch.launcher.options import Options
from dslaunch.launcher.run import run_job

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "start" / "containers.md").read_text()


def blocks(kind: str) -> list[str]:
    return [text.replace("\\\n", "") for text in re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)]


def jobs() -> list[list[str]]:
    """The words behind `dslaunch`, of every command that starts a job."""
    lines = [line for text in blocks("sh") for line in text.splitlines()]
    words = [shlex.split(line) for line in lines]
    found = [line[line.index("dslaunch") + 1 :] for line in words]
    return [line for line in found if line[0] not in cli.COMMANDS]


def options_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Options:
    taken: list[Options] = []
    monkeypatch.setattr(run_job, "run", lambda options: taken.append(options) or 0)
    with pytest.raises(SystemExit):
        cli.main(words)
    return taken[0]


def test_every_command_is_one_of_dslaunch(monkeypatch: pytest.MonkeyPatch) -> None:
    one_machine, on_each, by_ssh = (options_of(words, monkeypatch) for words in jobs())
    assert {one.program for one in (one_machine, on_each, by_ssh)} == {"train.py"}
    assert one_machine.hostfile is None
    assert on_each.rendezvous.no_ssh
    assert (on_each.rendezvous.node_rank, on_each.master_addr) == (0, "10.0.0.1")
    assert by_ssh.hostfile == "hosts"


def test_docker_waits_longer_than_the_workers_may_take() -> None:
    (docker_s,) = map(int, re.findall(r"docker stop --time (\d+)", GUIDE))
    (default_s,) = map(int, re.findall(r"`--kill_grace` \((\d+)\)", GUIDE))
    assert Options(program="t.py").kill_grace_s == default_s < docker_s


def test_the_hostfile_is_one() -> None:
    (text,) = blocks("hostfile")
    assert [(host.port, host.user) for host in parse_hostfile(text, source="guide")] == [(2222, "root")] * 2
