"""`dslaunch exec` on several real hosts: once on each, whatever the others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command, poll

pytestmark = pytest.mark.slow


def execute(lab: Lab, folder: Path, *words: str, env: dict[str, str] | None = None) -> Command:
    return Command(lab.head, folder, "exec", "-H", "hosts", *words, env=env)


def test_equal_output_is_folded_and_a_slot_is_no_host(lab: Lab, folder: Path) -> None:
    command = execute(lab, folder, "--", "echo", "fine")
    assert command.wait() == 0, command.err
    assert command.out == "node[1-4]: fine\n"
    assert command.err == ""
    command = execute(lab, folder, "-i", "node2@node4", "uname", "-n")
    assert command.wait() == 0
    assert command.out == "node2: node2\nnode4: node4\n"


def test_arguments_and_output_are_the_same_bytes(lab: Lab, folder: Path) -> None:
    words = [
        "",
        " ",
        "a b",
        "$HOME",
        "*",
        "~",
        "`id`",
        "'",
        '"',
        "\\",
        "\udcff",
        "%h",
        "-x",
        "--json",
        "--",
    ]
    program = "import os, sys; os.write(1, b'|'.join(os.fsencode(one) for one in sys.argv[1:]))"
    command = execute(lab, folder, "-i", "node1", "--", sys.executable, "-c", program, *words)
    assert command.wait() == 0, command.err
    assert command.out == "node1: " + "|".join(words) + "\n"


def test_the_environment_is_a_job_s_without_a_rank(lab: Lab, folder: Path) -> None:
    (folder / ".deepspeed_env").write_text("PROBE=there\n")
    show = (
        "import os; print(os.getcwd(), os.environ['PROBE'], os.environ['NCCL_X'], *(one for one in "
        "os.environ if one.startswith(('RANK', 'LOCAL_', 'WORLD', 'MASTER_', 'TORCHELASTIC_'))))"
    )
    command = execute(lab, folder, "--", sys.executable, "-c", show, env={"NCCL_X": "1"})
    assert command.wait() == 0, command.err
    assert command.out == f"node[1-4]: {folder} there 1\n"


def test_a_failure_or_a_lost_host_does_not_keep_the_others_from_it(lab: Lab, folder: Path) -> None:
    lab.host("node2").sshd_kill()
    script = "sleep 0.5; echo did; [ $(uname -n) != node3 ] || exit 7"
    command = execute(lab, folder, "--", "sh", "-c", script)
    assert command.wait() == 3, "node2 could not be used, which was known first"
    assert command.out == "node[1,3-4]: did\n"
    assert "dslaunch: node2: node2 port 22 refused the connection" in command.err
    assert "dslaunch: node3: exited with code 7\n" in command.err
    assert lab.wait_until_clean() == []


def test_equal_failures_are_one_sentence(lab: Lab, folder: Path) -> None:
    command = execute(lab, folder, "--", "sh", "-c", "echo bad >&2; kill -9 $$")
    assert command.wait() == 137
    assert command.err == "node[1-4]: bad\ndslaunch: node[1-4]: was killed by SIGKILL (9)\n"


def test_with_fail_fast_the_first_failure_ends_it_everywhere(lab: Lab, folder: Path) -> None:
    script = "[ $(uname -n) != node3 ] || exit 7; exec sleep 600"
    command = execute(lab, folder, "--fail_fast", "--", "sh", "-c", script)
    assert command.wait() == 7
    assert "dslaunch: node3 exited with code 7: stopping the others" in command.err
    assert lab.wait_until_clean() == []


def test_without_folding_lines_come_when_they_are_written_and_an_interrupt_ends_it(
    lab: Lab, folder: Path
) -> None:
    command = execute(lab, folder, "--no_fold", "--", "sh", "-c", "echo up; exec sleep 600")
    poll(lambda: command.out.count("up") == 4, "all up", command)
    assert sorted(command.out.splitlines()) == [f"node{place}: up" for place in range(1, 5)]
    command.process.send_signal(signal.SIGINT)
    assert command.wait(20) == 130
    assert lab.wait_until_clean() == []


def test_a_reader_that_goes_away_ends_it(lab: Lab, folder: Path) -> None:
    words = [sys.executable, "-m", "dslaunch", "exec", "-H", "hosts", "--no_fold", "--", "yes"]
    process = lab.head.popen(
        words, cwd=str(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert b": y\n" in os.read(process.stdout.fileno(), 1 << 16)
    process.stdout.close()
    assert process.wait(30) == 141
    process.stderr.close()
    assert lab.wait_until_clean() == []


def test_nothing_but_the_command_is_seen_in_ps(lab: Lab, folder: Path) -> None:
    env = {"NCCL_SECRET": "canary-7"}
    command = execute(lab, folder, "--", "sh", "-c", "while [ ! -e go ]; do sleep 0.1; done", env=env)
    node = lab.host("node1")
    poll(lambda: any("! -e go" in one.argv for one in node.processes()), "the command", command)
    shown = [one.argv for one in node.processes()]
    (folder / "go").touch()
    assert command.wait() == 0
    assert not any("canary" in one for one in shown)
    others = [one for one in shown if "! -e go" not in one and not one.strip("[]").startswith("sleep")]
    assert all("exec(eval(" in one or "sshd" in one for one in others), others


def test_a_folder_that_a_host_lacks_is_named(lab: Lab, folder: Path) -> None:
    began = time.monotonic()
    (lab.host("node1").home / "only").mkdir()
    command = execute(lab, folder, "--cwd=/root/only", "--", "pwd")
    assert command.wait() == 3
    assert time.monotonic() - began < 30
    assert command.out == "node1: /root/only\n"
    assert "dslaunch: node[2-4]: cannot use the folder /root/only: No such file or directory" in command.err
