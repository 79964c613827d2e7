from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from dslaunch.launcher.node.system.pid_file import PidFileInUse, write_pid_file
from tests.lab import Lab
from tests.launcher.command import Command
from tests.launcher.local_job import Start, poll
from tests.launcher.node.no_file import KINDS, put_no_file


def test_the_file_is_named_for_the_launcher_and_holds_the_agent(tmp_path: Path) -> None:
    path = write_pid_file(77, 78, folder=str(tmp_path))
    assert path == f"{tmp_path}/77.deepspeed"
    assert Path(path).read_text() == "78"


def test_a_file_of_a_process_that_runs_stays(tmp_path: Path) -> None:
    path = write_pid_file(77, os.getpid(), folder=str(tmp_path))
    with pytest.raises(PidFileInUse, match=f"77.deepspeed is there already, and process {os.getpid()} "):
        write_pid_file(77, 78, folder=str(tmp_path))
    assert Path(path).read_text() == str(os.getpid())


@pytest.mark.parametrize("text", ["", "no pid", "dead"])
def test_a_file_that_was_left_is_replaced(text: str, tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    (tmp_path / "77.deepspeed").write_text(str(child.pid) if text == "dead" else text)
    assert Path(write_pid_file(77, 78, folder=str(tmp_path))).read_text() == "78"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_ours_stays_and_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "77.deepspeed"
    (tmp_path / "precious").write_text("years of work")
    put_no_file(kind, path, linked=tmp_path / "precious")
    why = "symbolic link" if kind == "link" else "regular file"
    with pytest.raises(OSError, match=why):
        write_pid_file(77, 78, folder=str(tmp_path))
    assert os.path.lexists(path)
    assert (tmp_path / "precious").read_text() == "years of work"


def test_a_disk_that_takes_nothing_is_named_and_keeps_no_empty_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a full disk: a file can be made, and nothing can be written to it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match=r"77\.deepspeed"):
            write_pid_file(77, 78, folder=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_stays(tmp_path: Path) -> None:
    path = tmp_path / "77.deepspeed"
    path.write_text("none")
    os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match="belongs to another user"):
        write_pid_file(77, 78, folder=str(tmp_path))
    assert path.read_text() == "none"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["failure", "agent killed"])
def test_it_is_there_while_the_job_runs_and_gone_after_every_end(end: str, start: Start) -> None:
    job = start(
        "say('ready')\nwhile not os.path.exists('go'): time.sleep(0.005)\nsys.exit(int(open('go').read()))",
        "--save_pid",
    )
    path = Path(f"/tmp/{job.process.pid}.deepspeed")
    job.wait_for("ready")
    assert path.read_text() == str(job.agent().pid)
    if end == "agent killed":
        os.kill(int(path.read_text()), signal.SIGKILL)
    else:
        (job.folder / "writing").write_text("4")
        (job.folder / "writing").rename(job.folder / "go")
    job.wait()
    poll(lambda: not path.exists(), f"the end of {path}")


@pytest.mark.slow
def test_it_is_there_in_every_attempt_and_on_every_host(lab: Lab) -> None:
    folder = lab.shared / "pid-file"
    folder.mkdir()
    show = "import glob, os, sys, time\n" + (
        "(path,) = glob.glob('/tmp/*.deepspeed')\n"
        "with open(path) as file: agent = file.read()\n"
        "os.write(1, b'%r %r\\n' % (os.path.exists('/proc/' + agent), os.getppid() == int(agent)))\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    (folder / "train.py").write_text(show)
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    command = Command(
        lab.head, folder, "-H", "hosts", "--save_pid", "--max_restarts=1", "--min_uptime=0", "train.py"
    )
    assert command.wait() == 0, command.err
    lines = [line.partition(" | ")[2] for line in command.out.splitlines()]
    assert set(lines) == {"True True"}
    assert len(lines) >= 3
    for node in lab.nodes[:2]:
        assert node.run(["sh", "-c", "ls /tmp/*.deepspeed"]).stdout == ""
