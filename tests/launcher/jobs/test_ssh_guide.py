"""The commands of docs/start/cluster.md, run as they stand there on real hosts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[3]
COMMANDS = re.findall(
    r"^```console\n(.*?)```",
    (CHECKOUT / "docs" / "start" / "cluster.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", [line for block in COMMANDS for line in block.splitlines()])
def test_a_command_of_the_guide_works(lab: Lab, line: str) -> None:
    folder = lab.shared / re.sub(r"\W+", "_", line)[:80]
    folder.mkdir()
    (folder / "docs").symlink_to(CHECKOUT / "docs")
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    program, *words = shlex.split(line)
    assert program == "dslaunch"
    command = Command(lab.head, folder, *words, env={"OMP_NUM_THREADS": "1"})
    assert command.wait(250) == 0, command.err
    assert command.out
    assert lab.wait_until_clean() == []


def test_the_scanned_key_of_the_guide_is_one_that_is_accepted(lab: Lab) -> None:
    folder = lab.shared / "guide-scan"
    folder.mkdir()
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    (lab.head.home / ".ssh" / "known_hosts").write_text("")
    words = ("exec", "-H", "hosts", "--", "true")
    command = Command(lab.head, folder, *words)
    assert command.wait() == 3
    assert command.err.count("its host key is not known") == 2
    scan = "ssh-keyscan node1 node2 >> ~/.ssh/known_hosts"
    assert scan in (CHECKOUT / "docs" / "start" / "cluster.md").read_text()
    lab.head.run(["sh", "-c", scan], check=True)
    command = Command(lab.head, folder, *words)
    assert command.wait() == 0, command.err
