"""A job on this machine, which is told to go: by its agent's SIGTERM, a file or a command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launcher.local_job import Start

pytestmark = pytest.mark.slow

SAVES = """
import pathlib, sys
print("here", flush=True)
asked = pathlib.Path(os.environ["DSLAUNCH_RESIZE_FILE"])
while not asked.exists():
    time.sleep(0.01)
print("saved:", asked.read_text().strip(), flush=True)
sys.exit(75)
"""
WAITS = "print('here', flush=True)\ntime.sleep(600)\n"
ENDS = "0 hosts are left, and --min_nodes is 1; it has saved, and ends"


def test_a_command_is_a_notice_and_one_that_cannot_run_is_said(start: Start, tmp_path: Path) -> None:
    words = f"--notice_command=test -e {tmp_path}/going || /no/such/program"
    job = start(SAVES, "--num_gpus=1", words)
    job.wait_for("here")
    job.wait_for_err("warning: localhost: --notice_command: there is no such command")
    (tmp_path / "going").touch()
    assert job.wait() == 75, job.err
    assert job.err.count("there is no such command") == 1
    assert "saved: localhost was told to go (--notice_command ended with 0)" in job.out
    assert ENDS in job.err
    job.assert_nothing_is_left()


def test_the_first_sigterm_to_an_agent_is_a_notice_and_the_second_ends_the_job(start: Start) -> None:
    job = start(WAITS, "--num_gpus=1", "--max_nodes=1", "--kill_grace=2")
    job.wait_for("here")
    agent = job.agent()
    agent.send_signal(signal.SIGTERM)
    job.wait_for_err("localhost was told to go (its agent got SIGTERM)")
    assert agent.is_running()
    agent.send_signal(signal.SIGTERM)
    assert job.wait() == 3
    assert "the agent ended: it got SIGTERM" in job.err


def test_what_the_death_of_a_keeper_sends_is_no_notice(start: Start) -> None:
    job = start(WAITS, "--num_gpus=1", "--max_nodes=1", "--kill_grace=0.2")
    job.wait_for("here")
    job.keeper().kill()
    assert job.wait() == 3
    assert "told to go" not in job.err
    job.assert_nothing_is_left()
