"""Signals to a job whose command, here a script in srun's place, takes its time to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.detached_job import job as known, name_of, tell, wait_for_line, wait_for_state
from tests.launcher.local_job import Job, Start, poll

pytestmark = pytest.mark.slow

SRUN = """#!/bin/sh
trap 'touch told' TERM
touch up
until [ -e told ] && [ -e go ]; do sleep 0.01; done
touch ended
"""


@pytest.fixture
def job(start_words: Start, tmp_path: Path) -> Job:
    """It has been told to end, and ends when there is a file `go`."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    (tmp_path / "train.py").write_text("")
    path = f"{tmp_path}:{os.environ['PATH']}"
    made = start_words("--launcher=slurm", "-H", "hosts", "train.py", env={"PATH": path})
    poll((tmp_path / "up").exists, "the command")
    made.signal(signal.SIGTERM)
    made.wait_for_err("stopping srun")
    poll((tmp_path / "told").exists, "the signal")
    return made


def test_a_command_may_end_by_itself_soon_after_a_second_signal(job: Job) -> None:
    job.signal(signal.SIGTERM)
    job.wait_for_err("killing srun")
    (job.folder / "go").touch()
    assert job.wait() == 143
    assert (job.folder / "ended").exists()


def test_a_command_that_does_not_end_is_killed(job: Job) -> None:
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert not (job.folder / "ended").exists()
    job.assert_nothing_is_left()


def test_a_signal_for_the_workers_goes_to_the_command(start_words: Start, tmp_path: Path) -> None:
    """Which passes it on; of itself it would end dslaunch."""
    (tmp_path / "srun").write_text("#!/bin/sh\ntrap 'exit 7' USR1\ntouch up\nwhile :; do sleep 0.01; done\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    (tmp_path / "train.py").write_text("")
    path = f"{tmp_path}:{os.environ['PATH']}"
    made = start_words("--launcher=slurm", "-H", "hosts", "train.py", env={"PATH": path})
    poll((tmp_path / "up").exists, "the command")
    made.signal(signal.SIGQUIT)
    made.wait_for_err("SIGQUIT (3): srun has started the ranks, and they cannot be asked from here")
    made.signal(signal.SIGUSR1)
    assert made.wait() == 7
    assert "SIGUSR1 (10): passed on to srun" in made.err


STRUCK = """
import os, signal, sys, tempfile
from dslaunch.launcher.command_line import cli

class Struck(tempfile.TemporaryDirectory):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

tempfile.TemporaryDirectory = Struck
cli.main(["--launcher=slurm", "-H", "hosts", "train.py"])
"""


def test_a_signal_before_the_command_starts_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    (tmp_path / "train.py").touch()
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STRUCK],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 143, done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


TALKING = """#!/bin/sh
printf 'out of %s\\n' "ranks"
printf 'err of ranks\\nno end of line' >&2
trap 'exit 9' TERM
while :; do sleep 0.01; done
"""


@pytest.fixture
def detached(start_words: Start, tmp_path: Path) -> Job:
    (tmp_path / "srun").write_text(TALKING)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts").write_text("node[1-2] slots=2\n")
    (tmp_path / "train.py").write_text("")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state")}
    return start_words("--detach", "--launcher=slurm", "-H", "hosts", "train.py", env=env)


def test_a_detached_job_keeps_what_its_program_prints_and_is_stopped(detached: Job, tmp_path: Path) -> None:
    name = name_of(detached)
    wait_for_line(tmp_path, name, "out of ranks")
    found = known(tmp_path, name)
    assert (found["state"], found["launcher"], found["num_ranks"]) == ("running", "slurm", 4)
    refused = tell(tmp_path, "stacks", name)
    assert refused.code == 2
    assert "has its ranks started by slurm, which dslaunch cannot ask" in refused.err
    assert tell(tmp_path, "stop", name).code == 0
    attached = tell(tmp_path, "attach", name)
    assert attached.code == 143, attached
    assert attached.out == "out of ranks\n"
    assert attached.err.startswith("err of ranks\n")
    assert "\nno end of line" in attached.err
    assert wait_for_state(tmp_path, name, "ended")["exit_code"] == 143
    detached.assert_nothing_is_left()
