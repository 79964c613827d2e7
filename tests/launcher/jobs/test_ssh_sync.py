"""Files on hosts that share no folder with the launcher: sent before a job, brought back after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

SHOW = "print(open('data/words.txt').read().strip(), flush=True)\n"


class Project:
    """A folder in the home of the head, which no other host sees."""

    def __init__(self, lab: Lab, words: Path) -> None:
        self.lab = lab
        self.here = lab.head.home / "project"
        self._words = words
        self.here.mkdir()
        self.write("show.py", SHOW)
        self.write("data/words.txt", "first\n")
        (self.here / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:2]))

    def write(self, name: str, text: str) -> None:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def on(self, host: Host, name: str = "") -> Path:
        return host.home / "project" / name

    def run(self, *words: str) -> Command:
        """A job in it, to its end."""
        command = Command(
            self.lab.head, self._words, "-H", "hosts", "--sync", ".", *words, cwd="/root/project"
        )
        command.wait()
        return command


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Project:
    return Project(lab, tmp_path)


def test_a_job_finds_its_folder_on_hosts_that_do_not_share_it(lab: Lab, project: Project) -> None:
    first = project.run("show.py")
    print(first.err)
    assert first.process.returncode == 0, first.err
    assert first.lines("node1:0") == first.lines("node2:1") == ["first"]
    project.write("data/words.txt", "second\n")
    second = project.run("--timings", "show.py")
    print(second.err)
    assert second.lines("node1:0") == second.lines("node2:1") == ["second"], second.err


def test_what_was_changed_there_is_named_and_not_overwritten(lab: Lab, project: Project) -> None:
    assert project.run("show.py").process.returncode == 0
    project.on(lab.nodes[1], "data/words.txt").write_text("theirs\n")
    project.write("data/words.txt", "ours\n")
    refused = project.run("show.py")
    print(refused.err)
    assert refused.process.returncode == 3
    assert refused.out == ""
    assert "node2: --sync to /root/project: data/words.txt there" in refused.err
    assert project.on(lab.nodes[1], "data/words.txt").read_text() == "theirs\n"
    forced = project.run("--sync_force", "show.py")
    assert forced.lines("node2:1") == ["ours"], forced.err


LAST_WORDS = """
import os, signal, sys
if os.environ["RANK"] == "0":
    def end(number, frame):
        open("out-0.txt", "w").write("x" * 100)
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    signal.pause()
open("out-1.txt", "w").write("y" * 100)
sys.exit(5)
"""


def test_files_come_back_also_after_a_failure(lab: Lab, project: Project) -> None:
    project.write("last_words.py", LAST_WORDS)
    command = project.run("--collect", "*.txt", "--collect", "none*", "last_words.py")
    assert command.process.returncode == 5
    assert (project.here / "collected/node1/out-0.txt").read_text() == "x" * 100, command.err
    assert (project.here / "collected/node2/out-1.txt").read_text() == "y" * 100
    assert "no file matches none*" in command.err
