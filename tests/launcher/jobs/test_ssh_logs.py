"""Output of ranks on several real hosts: files on the launching machine, folded lines, prefixes,
the start on a terminal.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

WORKER = """
import os, sys, time
rank = int(os.environ["RANK"])
def say(text): os.write(1, text.encode() + b"\\n")
for number in range(10):
    open(f"here{rank}.{number}", "w").close()
    while not all(os.path.exists(f"here{one}.{number}") for one in range(4)): time.sleep(0.001)
    say(f"epoch {number}")
say(f"rank {rank} " + "x" * 65536)
sys.stderr.write("done\\n")
"""
LINES = [f"epoch {number}" for number in range(10)]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "train.py").write_text(WORKER)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return folder


def test_the_files_of_all_hosts_are_on_the_launching_machine(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "--log_dir=logs", "--tee=1,2", "train.py")
    assert command.wait() == 0, command.err
    attempt = (folder / "logs" / "latest").resolve(strict=True) / "attempt_0"
    for rank in range(4):
        expected = [*LINES, f"rank {rank} " + "x" * 65536]
        assert (attempt / f"rank00{rank}.stdout.log").read_text().splitlines() == expected
        assert (attempt / f"rank00{rank}.stderr.log").read_text() == "done\n"
        assert command.lines(f"node{1 + rank // 2}:{rank}") == (expected if rank in (1, 2) else [])


def test_one_file_per_rank_for_all_hosts(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "--enable_each_rank_log=logs", "train.py")
    assert command.wait() == 0, command.err
    assert command.out == ""
    names = sorted(one.name for one in (folder / "logs").iterdir())
    assert [re.sub(r"^\d{14}_", "", name) for name in names] == [f"rank{rank}.log" for rank in range(4)]


def test_lines_of_all_hosts_are_folded(lab: Lab, folder: Path) -> None:
    """How much is folded depends on the load of the machine: one line of two hosts is enough here."""
    command = Command(lab.head, folder, "-H", "hosts", "--fold", "train.py")
    assert command.wait() == 0, command.err
    written: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in command.out.splitlines():
        who, _, text = line.partition(" | ")
        for first, last in re.findall(r"(?<=[:,])(\d+)(?:-(\d+))?", who):
            for rank in range(int(first), int(last or first) + 1):
                written[rank].append(text)
    assert written == {rank: [*LINES, f"rank {rank} " + "x" * 65536] for rank in range(4)}
    assert re.search(r"^node\d:\d-\d, node\d:\d-\d.* \| epoch ", command.out, flags=re.MULTILINE)
