"""Nothing of a job is left on this machine, whichever process dies."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.launcher.local_job import AT_ONCE_S, Start, assert_short, poll

pytestmark = pytest.mark.slow

SMALL_GRACE = "--kill_grace=0.2"


@pytest.mark.parametrize("victim", ["launcher", "keeper", "agent"])
def test_nothing_is_left_when_a_process_of_ours_is_killed(victim: str, start: Start) -> None:
    job = start(
        "escape(); signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); wait()",
        "--num_gpus=2",
        SMALL_GRACE,
    )
    job.wait_for("ready", times=2)
    assert len(job.survivors()) == 7
    process = {"launcher": lambda: psutil.Process(job.process.pid), "keeper": job.keeper, "agent": job.agent}[
        victim
    ]()
    process.kill()
    job.assert_nothing_is_left(10)
    assert job.wait() == (137 if victim == "launcher" else 3)
    assert_short(job)


def test_a_job_whose_agent_was_ended_did_not_end_well(start: Start) -> None:
    """Also if every worker exits with 0 at SIGTERM."""
    job = start("signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0)); say('ready'); wait()")
    job.wait_for("ready")
    job.keeper().send_signal(signal.SIGTERM)  # which passes it on
    assert job.wait() == 3
    assert "localhost: the agent ended: it got SIGTERM" in job.err
    job.assert_nothing_is_left()


def test_what_outlives_its_worker_is_ended_and_said(start: Start) -> None:
    job = start("escape(); subprocess.Popen(['sleep', '1000']); say('ready')", "--num_gpus=2")
    assert job.wait() == 0
    assert "warning: localhost: ended 4 processes that outlived their worker" in job.err
    assert not job.survivors()


def test_what_outlives_its_worker_may_write_without_end(start: Start) -> None:
    job = start("subprocess.Popen(['yes'], preexec_fn=os.setsid); say('ready')")
    assert job.wait() == 0
    assert not job.survivors()


def test_a_stopped_worker_still_gets_its_sigterm(start: Start) -> None:
    job = start(
        """
        def save(number, frame):
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready', os.getpid())
        wait()
        """
    )
    job.wait_for("ready")
    worker = psutil.Process(int(job.lines(0)[0].split()[1]))
    worker.suspend()
    poll(lambda: worker.status() == psutil.STATUS_STOPPED, "the stop")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert job.lines(0)[1:] == ["saved"]


def test_a_lost_launcher_is_noticed_by_its_silence(start: Start) -> None:
    """A stopped launcher sends no pings, and its pipe does not end."""
    job = start("say('ready'); wait()", "--heartbeat=1", SMALL_GRACE)
    job.wait_for("ready")
    psutil.Process(job.process.pid).suspend()
    poll(lambda: job.survivors() == [job.process.pid], "the end of the workers")
    psutil.Process(job.process.pid).resume()
    assert job.wait() == 3
