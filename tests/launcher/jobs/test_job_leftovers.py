"""Nothing of a job is left on this machine, whichever process dies."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher.local_job import AT_ONCE_S, WORKER, Job, Start, assert_short, poll

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


def test_workers_end_when_both_processes_above_them_are_killed(start: Start) -> None:
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); wait()", "--num_gpus=2")
    job.wait_for("ready", times=2)
    keeper, agent = job.keeper(), job.agent()
    keeper.suspend()
    agent.kill()
    keeper.kill()
    job.assert_nothing_is_left(10)
    assert job.wait() == 3


@pytest.mark.parametrize("victim", ["keeper", "agent"])
def test_a_job_whose_agent_was_ended_did_not_end_well(victim: str, start: Start) -> None:
    """Also if every worker exits with 0 at SIGTERM."""
    job = start("signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0)); say('ready'); wait()")
    job.wait_for("ready")
    (job.keeper if victim == "keeper" else job.agent)().send_signal(signal.SIGTERM)
    assert job.wait() == 3
    assert "localhost: the agent ended: it got SIGTERM" in job.err
    job.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("what", "num_gpus", "said"),
    [
        ("escape(); subprocess.Popen(['sleep', '1000'])", 2, "ended 4 processes that outlived their worker"),
        ("subprocess.Popen(['sleep', '1000'])", 1, "ended 1 process that outlived its worker"),
    ],
)
def test_what_outlives_its_worker_is_ended_and_said(
    what: str, num_gpus: int, said: str, start: Start
) -> None:
    job = start(f"{what}; say('ready')", f"--num_gpus={num_gpus}")
    assert job.wait() == 0
    assert f"warning: localhost: {said}" in job.err
    assert not job.survivors()


def test_what_outlives_its_worker_may_write_without_end(start: Start) -> None:
    job = start("subprocess.Popen(['yes'], preexec_fn=os.setsid); say('ready')")
    assert job.wait() == 0
    assert not job.survivors()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open('deaf', 'w').close()
            wait()
        while not os.path.exists('deaf'): time.sleep(0.001)
        sys.exit(5)
        """,
        "--num_gpus=2",
        SMALL_GRACE,
    )
    assert job.wait(AT_ONCE_S) == 5
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


def test_two_jobs_do_not_touch_each_other(start: Start, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text(WORKER + "say('ready'); wait()")
    other = Job(tmp_path / "other", ["train.py"])
    try:
        other.wait_for("ready")
        job = start("say('ready'); wait()")
        job.wait_for("ready")
        assert len(other.survivors()) == 4
        job.process.kill()
        job.assert_nothing_is_left()
        assert len(other.survivors()) == 4
    finally:
        other.end()
