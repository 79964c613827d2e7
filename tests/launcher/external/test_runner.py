"""Signals to a job whose command, here a script in srun's place, takes its time to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
