"""Interrupts and other signals that end a job on this machine."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.launcher.local_job import AT_ONCE_S, Job, Start, poll

pytestmark = pytest.mark.slow

SMALL_GRACE = "--kill_grace=0.2"


def test_one_interrupt_lets_the_workers_finish_what_they_do_at_sigterm(start: Start) -> None:
    job = start(
        """
        def save(number, frame):
            say('saving')
            time.sleep(0.05)
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready')
        wait()
        """,
        "--num_gpus=2",
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert (job.lines(0), job.lines(1)) == (["ready", "saving", "saved"],) * 2
    assert (
        "SIGINT (2): stopping 2 workers (SIGTERM, and SIGKILL after 30 s; Ctrl-C again kills them now)"
        in job.err
    )
    assert "failed" not in job.err
    job.assert_nothing_is_left()


def test_a_second_interrupt_kills_at_once(start: Start) -> None:
    job = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); escape(); say('ready'); wait()", "--num_gpus=2"
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGINT)
    job.wait_for_err("stopping 2 workers")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert "killing all workers now" in job.err
    job.assert_nothing_is_left()


def test_a_hang_up_ends_the_job_too(start: Start) -> None:
    job = start("escape(); say('ready'); wait()", "--num_gpus=2", SMALL_GRACE)
    job.wait_for("ready", times=2)
    job.signal(signal.SIGHUP)
    assert job.wait() == 129
    job.assert_nothing_is_left()


def test_with_nohup_a_hang_up_changes_nothing(start: Start) -> None:
    job = start(
        """
        import pathlib
        say('ready')
        while not pathlib.Path('go').exists(): time.sleep(0.005)
        """,
        shell='trap "" HUP; exec "$@"',
    )
    job.wait_for("ready")
    job.signal(signal.SIGHUP)
    (job.folder / "go").touch()
    assert job.wait() == 0


def test_what_an_interrupt_ends_before_the_workers_start_has_not_failed(start: Start, tmp_path: Path) -> None:
    """The script's end is known while something is still left: a killed process that has much
    memory to give back.
    """
    big = "import pathlib, time; x = b'x' * (1 << 28); pathlib.Path('sourcing').touch(); time.sleep(1000)"
    (tmp_path / "venv.sh").write_text(f'{sys.executable} -c "{big}" &\nwait\n')
    job = start("say('started')", "--venv_script=venv.sh")
    poll((tmp_path / "sourcing").exists, "the venv script")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert job.out == ""
    assert job.err.endswith("dslaunch: SIGINT (2): nothing was started\n")
    assert "failed" not in job.err
    job.assert_nothing_is_left()


def test_an_interrupt_while_the_program_is_loaded_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "click.py").write_text("import time\nopen('loading', 'w').close()\ntime.sleep(60)\n")
    job = start("say('ready')", env={"PYTHONPATH": str(tmp_path / "slow")})
    poll(lambda: (tmp_path / "loading").exists(), "the import")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.err == "dslaunch: interrupted: nothing was started\n"


def test_an_interrupt_while_hosts_are_connected_says_that_nothing_was_started(
    start: Start, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (tmp_path / "hosts").write_text(f"127.0.0.1 slots=1 port={port}\n")
        job = start("say('ready')", "-H", "hosts", "--force_multi")
        silent.settimeout(60)
        connection = silent.accept()[0]
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        connection.close()
    assert job.err.splitlines()[-1] in (
        "dslaunch: SIGINT (2): nothing was started",
        "dslaunch: interrupted: nothing was started",  # before the job watches signals
    )
    assert "Traceback" not in job.err


def job_between_two_starts(start: Start, tmp_path: Path, *words: str) -> Job:
    """A job whose rank has failed, and whose next start waits for a look at the host that does not end."""
    first, asked = tmp_path / "first", tmp_path / "asked"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text(
        "import os, time\n"
        f"if os.path.exists({str(first)!r}):\n"
        f"    open({str(asked)!r}, 'w').close()\n"
        "    time.sleep(60)\n"
        "raise ImportError('none')\n"
    )
    worker = f"say(os.getppid()); open({str(first)!r}, 'w').close(); exit(5)"
    words = ("--check", "--max_restarts=1", "--min_uptime=0", *words)
    job = start(worker, *words, env={"PYTHONPATH": str(tmp_path / "slow")})
    poll(asked.exists, "the look before the second start")
    return job


def test_a_signal_between_two_starts_is_in_the_report(start: Start, tmp_path: Path) -> None:
    job = job_between_two_starts(start, tmp_path, "--report=report.json")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.err.endswith("dslaunch: SIGTERM (15): the job is not started again\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_code"], report["interrupted_by"]) == (143, "SIGTERM (15)")
    (attempt,) = report["attempts"]
    assert (attempt["exit_code"], attempt["interrupted_by"]) == (5, None)
    assert attempt["decision"].endswith("; SIGTERM (15): the job is not started again")
    job.assert_nothing_is_left()


def test_nothing_is_left_when_the_launcher_is_killed_between_two_starts(start: Start, tmp_path: Path) -> None:
    """The agent waits for the next start then."""
    job = job_between_two_starts(start, tmp_path)
    agent = int(job.lines(0)[0])
    assert agent in job.survivors()
    job.process.kill()
    job.assert_nothing_is_left()
