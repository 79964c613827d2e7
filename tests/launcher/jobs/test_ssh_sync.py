"""Files on hosts that share no folder with the launcher: sent before a job, brought back after it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Host, Lab
from tests.launcher.command import AT_ONCE_S, Command, poll

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

    def start(self, *words: str) -> Command:
        return Command(self.lab.head, self._words, "-H", "hosts", "--sync", ".", *words, cwd="/root/project")

    def run(self, *words: str) -> Command:
        """A job in it, to its end."""
        command = self.start(*words)
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
import os, pathlib, signal, sys, time
ready = pathlib.Path(sys.argv[-1])
if os.environ["RANK"] == "0":
    def end(number, frame):
        open("out-0.txt", "w").write("x" * 100)
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    ready.touch()
    while True: signal.pause()
while not ready.exists(): time.sleep(0.01)
open("out-1.txt", "w").write("y" * 100)
sys.exit(5)
"""


def test_files_come_back_also_after_a_failure(lab: Lab, project: Project) -> None:
    project.write("last_words.py", LAST_WORDS)
    ready = lab.shared / "ready"
    command = project.run("--collect", "*.txt", "--collect", "none*", "last_words.py", str(ready))
    ready.unlink()
    assert command.process.returncode == 5
    assert (project.here / "collected/node1/out-0.txt").read_text() == "x" * 100, command.err
    assert (project.here / "collected/node2/out-1.txt").read_text() == "y" * 100
    assert "no file matches none*" in command.err


def assert_shows(command: Command, text: str, *ranks: str) -> None:
    assert command.process.returncode == 0, command.err
    assert [command.lines(rank) for rank in ranks] == [[text]] * len(ranks), command.out + command.err


# In the middle of 10 MB that go over a slow line.


def kill_launcher(project: Project, command: Command) -> None:
    command.process.kill()


def kill_agent(project: Project, command: Command) -> None:
    keeper_and_agent = sorted(one.pid for one in project.lab.nodes[0].processes() if "exec(eval(" in one.argv)
    os.kill(keeper_and_agent[1], signal.SIGKILL)


def kill_host(project: Project, command: Command) -> None:
    project.lab.nodes[0].die()


@pytest.mark.parametrize(
    "kill", few([kill_launcher, kill_agent, kill_host], lambda kill: kill is kill_launcher)
)
def test_a_kill_in_the_middle_leaves_the_old_files_and_the_next_sync_goes_on(
    lab: Lab, project: Project, kill: object
) -> None:
    assert callable(kill)
    assert_shows(project.run("show.py"), "first", "node1:0", "node2:1")
    project.write("data/words.txt", "second\n")
    draw = random.Random(1)
    for number in range(10):
        (project.here / f"large{number}").write_bytes(draw.randbytes(1_000_000))
    lab.head.slow_down(20)
    command = project.start("show.py")
    coming = project.on(lab.nodes[0], ".dslaunch/coming")
    poll(lambda: len(names_in(coming)) > 2, "some of the files on node1", command)
    kill(project, command)
    command.wait()
    assert command.out == ""
    assert project.on(lab.nodes[0], "data/words.txt").read_text() == "first\n"
    assert sorted(names_in(project.on(lab.nodes[0]))) == [".dslaunch", "data", "hosts", "show.py"]
    num_there = sum((coming / name).stat().st_size == 1_000_000 for name in names_in(coming))
    is_other_done = project.on(lab.nodes[1], "large9").exists()
    assert project.on(lab.nodes[1], "data/words.txt").read_text() == (
        "second\n" if is_other_done else "first\n"
    )
    lab.head.slow_down(10_000)
    if not lab.nodes[0].is_running:
        lab.nodes[0].boot()
    before = lab.head.tx_bytes()
    again = project.run("show.py")
    assert_shows(again, "second", "node1:0", "node2:1")
    most = 10e6 * (1 if is_other_done else 2) - 1e6 * num_there
    assert lab.head.tx_bytes() - before < 1.15 * most, "what had come was sent again"
    for number in range(10):
        for node in lab.nodes[:2]:
            name = f"large{number}"
            assert project.on(node, name).read_bytes() == (project.here / name).read_bytes()
    assert names_in(coming) == []


def names_in(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def test_a_folder_that_all_share_is_left_alone(lab: Lab, folder: Path, tmp_path: Path) -> None:
    (folder / "show.py").write_text("print('here', flush=True)\n")
    before = sorted(os.listdir(folder))
    command = Command(
        lab.head, tmp_path, "-H", "hosts", "-i", "node1@node2", "--sync", ".", "show.py", cwd=str(folder)
    )
    assert command.wait() == 0, command.err
    assert "--sync: 2 files" in command.err
    assert "node1, node2: the same folder as here" in command.err
    assert sorted(os.listdir(folder)) == before


def test_hosts_that_share_a_folder_with_each_other_only(lab: Lab, project: Project) -> None:
    """Whoever comes second waits, and finds everything there."""
    there = lab.shared / "there"
    (project.here / "hosts").write_text(
        "".join(f"{node.name} slots=1 cwd={there}\n" for node in lab.nodes[:3])
    )
    assert_shows(project.run("show.py"), "first", "node1:0", "node2:1", "node3:2")
    project.write("data/words.txt", "second\n")
    assert_shows(project.run("show.py"), "second", "node1:0", "node2:1", "node3:2")
    shutil.rmtree(there)


@pytest.mark.exhaustive
def test_a_spare_host_gets_the_folder_when_it_takes_part(lab: Lab, project: Project) -> None:
    project.write(
        "fail.py",
        "import os, sys\nprint(open('data/words.txt').read().strip(), flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.uname().nodename == 'node2':\n"
        "    os.kill(os.getppid(), 9)\n    sys.exit(1)\n",
    )
    (project.here / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    command = project.run("--spares", "1", "--max_restarts", "1", "--min_uptime", "0", "fail.py")
    assert command.process.returncode == 0, command.err
    assert project.on(lab.nodes[2], "data/words.txt").read_text() == "first\n"
    assert command.lines("node3:1") == ["first"], command.out + command.err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--launcher=openssh",), marks=pytest.mark.exhaustive, id="openssh"),
        pytest.param(("--tree_above=1", "--tree_radix=4"), id="tree"),
    ],
)
def test_another_way_to_the_hosts_is_as_good(lab: Lab, project: Project, words: tuple[str, ...]) -> None:
    (project.here / "large").write_bytes(random.Random(1).randbytes(1_500_000))
    (project.here / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
    ranks = [f"{node.name}:{place}" for place, node in enumerate(lab.nodes)]
    assert_shows(project.run(*words, "show.py"), "first", *ranks)
    for node in lab.nodes:
        assert project.on(node, "large").read_bytes() == (project.here / "large").read_bytes()


def test_a_file_that_changes_while_it_is_sent_ends_the_job_by_name(lab: Lab, project: Project) -> None:
    (project.here / "log.bin").write_bytes(random.Random(1).randbytes(4_000_000))
    lab.head.slow_down(20)
    command = project.start("show.py")
    poll(lambda: names_in(project.on(lab.nodes[0], ".dslaunch/coming")) != [], "a file on node1", command)
    with (project.here / "log.bin").open("ab") as file:
        file.write(b"more")
    assert command.wait() == 2
    assert "--sync: log.bin changed while it was read; wait until nothing writes to it" in command.err
    assert command.out == ""
    assert not project.on(lab.nodes[0], "log.bin").exists()


def test_an_interrupt_ends_a_sync_at_once(lab: Lab, project: Project) -> None:
    (project.here / "large").write_bytes(random.Random(1).randbytes(20_000_000))
    lab.head.slow_down(10)
    command = project.start("show.py")
    poll(lambda: names_in(project.on(lab.nodes[0], ".dslaunch/coming")) != [], "a file on node1", command)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(AT_ONCE_S) == 130
    assert sorted(names_in(project.on(lab.nodes[0]))) == [".dslaunch"]
    assert lab.wait_until_clean() == []


def test_a_second_interrupt_does_not_wait_for_files(lab: Lab, project: Project) -> None:
    project.write(
        "work.py",
        "import os, time\nopen('out.bin', 'wb').write(os.urandom(30_000_000))\nprint('up', flush=True)\n"
        "time.sleep(600)\n",
    )
    for node in lab.nodes[:2]:
        node.slow_down(5)
    command = project.start("--collect=out.bin", "--kill_grace=1", "work.py")
    command.wait_for("up", times=2)
    command.process.send_signal(signal.SIGINT)
    part = project.here / "collected/node1/out.bin.dslaunch-part"
    poll(part.exists, "a part of a file", command)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(AT_ONCE_S) == 130
    assert not part.exists()
    assert "warning: --collect: not brought: node1: what had not come when it was lost" in command.err
    assert lab.wait_until_clean() == []
